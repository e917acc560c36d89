// The sections of the report, as they are by now: fetched when rounds have ended.

const figures = (() => {
  const LEAST_MS = 2000; // between two of them
  const SHARE = 10; // of the time at most one part goes into making and showing them
  const sections = new Map(); // key -> what stands on the page, as text
  const charts = new Map(); // key -> its figure as text
  const stale = new Set();
  const parser = document.createElement("template");
  let drawing = null; // plotly.js, as soon as it is needed
  let wanted = false;
  let busy = false;

  const sight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      target.toggleAttribute("data-seen", isIntersecting);
      if (isIntersecting) draw(target);
    }
  }, { rootMargin: "300px" });

  function address(path) {
    const token = new URLSearchParams(location.search).get("token");
    return token ? `${path}?token=${encodeURIComponent(token)}` : path;
  }

  function library() {
    drawing ??= new Promise((done) => {
      const script = element("script");
      script.nonce = own.nonce;
      script.src = address("plotly.js");
      script.onload = done;
      script.onerror = () => { drawing = null; };
      document.head.append(script);
    });
    return drawing;
  }
  const own = document.currentScript;

  async function draw(target) {
    const key = target.dataset.chart;
    if (!stale.has(key)) return;
    await library();
    if (!stale.delete(key)) return;
    const begin = performance.now();
    await report.show(key, JSON.parse(charts.get(key)));
    performance.measure("collapipe:chart", { start: begin, detail: key });
  }

  // Put what is new in the place of what is old, piece by piece: charts that are open stay.
  function show(section) {
    parser.innerHTML = section.html;
    const fresh = parser.content.firstElementChild;
    const texts = [...fresh.children].map((child) => child.outerHTML);
    const before = sections.get(section.key);
    const there = document.getElementById(section.key);
    if (!there) byId("report").append(fresh);
    else if (before.length !== texts.length) there.replaceWith(fresh);
    else {
      [...fresh.children].forEach((child, index) => {
        if (texts[index] !== before[index]) exchange(there.children[index], child);
      });
    }
    sections.set(section.key, texts);
    for (const [key, figure] of Object.entries(section.charts)) {
      const text = JSON.stringify(figure);
      const target = document.querySelector(`[data-chart="${CSS.escape(key)}"]`);
      if (text === charts.get(key) && target.classList.contains("js-plotly-plot")) continue;
      charts.set(key, text);
      stale.add(key);
      sight.observe(target);
      if (target.hasAttribute("data-seen")) draw(target);
    }
  }

  function exchange(old, fresh) {
    const open = [...old.querySelectorAll("details")].map((details) => details.open);
    const place = old.querySelector(".scroll")?.scrollTop;
    const chosen = [...old.querySelectorAll("select")].map((select) => [select.dataset.choices, select.value]);
    old.replaceWith(fresh);
    fresh.querySelectorAll("details").forEach((details, index) => { details.open = Boolean(open[index]); });
    if (place) fresh.querySelector(".scroll").scrollTop = place;
    for (const [key, value] of chosen) {
      const select = fresh.querySelector(`select[data-choices="${CSS.escape(key)}"]`);
      if (select && [...select.options].some((option) => option.value === value)) select.value = value;
    }
  }

  function tell(found) {
    setText(byId("missing"), found.missing ? `No charts: ${found.missing}.` : "");
    byId("missing").hidden = !found.missing;
    showTiles(byId("overview"), (found.tiles || []).map(([title, value, note, warning]) => [value, `${title}${note ? `: ${note}` : ""}`, warning]));
    byId("whole").hidden = !found.tiles;
    const keys = found.sections.map((section) => section.key);
    for (const key of [...sections.keys()].filter((each) => !keys.includes(each))) {
      document.getElementById(key).remove();
      sections.delete(key);
    }
    found.sections.forEach(show);
    const links = found.sections.map(({ key, title }) => {
      const link = element("a", "", title);
      link.href = `#${key}`;
      return link;
    });
    if (byId("contents").children.length !== links.length) byId("contents").replaceChildren(...links);
  }

  // Ask for what is new, as soon as the last answer is on the page for long enough.
  async function refresh() {
    wanted = true;
    if (busy) return;
    busy = true;
    while (wanted && !document.hidden) {
      wanted = false;
      const begin = performance.now();
      try {
        const answer = await fetch(address("report"));
        if (answer.ok) tell(await answer.json());
      } catch (error) {
        if (!(error instanceof TypeError)) throw error; // no connection: the stream will be back
      }
      const took = performance.now() - begin;
      performance.measure("collapipe:report", { start: begin });
      await new Promise((done) => setTimeout(done, Math.max(LEAST_MS, SHARE * took)));
    }
    busy = false;
  }

  return { refresh };
})();
