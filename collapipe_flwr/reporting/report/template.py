"""The page of a report: its markup, its look, and what it does in a browser.

The Jinja templates escape whatever is put into them; the CSS is for light and dark, narrow and
wide, and for paper. The script puts colours into figures and lets plotly.js draw them; an open page
is updated by `report.show(key, chart)` with a chart as in its own data. All are Python strings,
because a FAB carries no files of these kinds.
"""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ page.title }}</title>
<link rel="icon" href="data:,">
<style>{{ css | safe }}</style>
</head>
<body>
<header>
<h1>{{ page.title }}</h1>
{% if page.reason %}<p class="warning" id="reason">{{ page.reason }}</p>{% endif %}
<p class="quiet">{{ page.made }}</p>
{% if page.tiles %}
<div class="tiles" id="overview" style="--columns: {{ columns }}">
{% for tile in page.tiles %}
<div class="card tile">
<div class="quiet">{{ tile.title }}</div>
<div class="value{{ ' warning' if tile.warning }}">{{ tile.value }}</div>
<div class="quiet">{{ tile.note }}</div>
</div>
{% endfor %}
</div>
{% endif %}
{% for note in page.notes %}<p class="quiet">{{ note }}</p>{% endfor %}
<nav>
{% for section in page.sections %}
<a href="#{{ section.key }}">{{ section.title }}</a>
{% endfor %}
</nav>
<noscript><p class="warning">The charts need JavaScript; the tables do not.</p></noscript>
</header>
<main>
{% for section in page.sections %}
{% include "section" %}
{% endfor %}
</main>
<footer class="quiet">Made from events.jsonl and summary.json; to make it
anew: <code>collapipe report RUN</code>.</footer>
<script type="application/json" id="charts">{{ page.charts | tojson }}</script>
<script>{{ plotly | safe }}</script>
<script>{{ script | safe }}</script>
</body>
</html>
"""
SECTION = """<section id="{{ section.key }}">
<h2>{{ section.title }}</h2>
{% if section.text %}<p class="quiet">{{ section.text }}</p>{% endif %}
{% if not section.charts and not section.tables %}
<p class="quiet empty">{{ section.empty }}</p>
{% endif %}
{% if section.charts %}
<div class="charts">
{% for chart in section.charts %}
<div class="card">
<h3>{{ chart.title }}</h3>
{% if chart.note %}<p class="quiet">{{ chart.note }}</p>{% endif %}
{% if chart.choices | length > 1 %}
<select data-choices="{{ chart.key }}" aria-label="cluster">
{% for name in chart.choices %}<option value="{{ name }}">{{ name }}</option>{% endfor %}
</select>
{% endif %}
<div class="scroll">
<div class="chart" data-chart="{{ chart.key }}" role="img"
 aria-label="{{ chart.title }}: a picture, whose values are in the table below"></div>
</div>
<details class="values" data-values="{{ chart.key }}">
<summary>Values<span class="unseen"> of: {{ chart.title }}</span></summary>
</details>
</div>
{% endfor %}
</div>
{% endif %}
{% for table in section.tables %}
<div class="card">
{% if table.folded %}
<details><summary>{{ table.title }}</summary>
{% else %}
<h3>{{ table.title }}</h3>
{% endif %}
{% if table.note %}<p class="quiet">{{ table.note }}</p>{% endif %}
<div class="scroll" role="region" aria-label="{{ table.title }}" tabindex="0"><table>
<thead><tr>{% for cell in table.head %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>
{% for cell in row %}
<td{{ ' class=long' if cell | length > 28 }}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% if table.folded %}</details>{% endif %}
</div>
{% endfor %}
</section>
"""
CSS = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --text: #1b1f24; --quiet: #59616b; --rule: #dfe3e8;
  --accent: #0072b2; --warning: #b84a00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #181c22; --text: #e8ebef; --quiet: #a3acb7; --rule: #2e353e;
    --accent: #56b4e9; --warning: #ff9a5c;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
header, main, footer { max-width: 1440px; margin: 0 auto; padding: 0 clamp(12px, 3vw, 32px); }
header { padding-top: 24px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 8px; }
h3 { font-size: 1rem; margin: 0 0 2px; overflow-wrap: anywhere; }
p { margin: 0 0 8px; }
.quiet { color: var(--quiet); font-size: .875rem; overflow-wrap: anywhere; }
.warning { color: var(--warning); }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 12px 0; font-size: .9rem; }
a { color: var(--accent); }
.tiles {
  --share: calc((100% - 12px * (var(--columns, 7) - 1)) / var(--columns, 7));
  display: grid; gap: 12px; margin: 16px 0;
  grid-template-columns: repeat(auto-fit, minmax(max(140px, var(--share)), 1fr));
}
@media (max-width: 460px) { .tiles > :last-child:nth-child(odd) { grid-column: 1 / -1; } }
.card {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px;
  min-width: 0;
}
.tile .value { font-size: 1.35rem; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }
section { margin: 28px 0; }
.charts {
  display: grid; gap: 12px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
}
.chart { min-height: 150px; width: 100%; }
section > .card { margin-top: 12px; }
select {
  font: inherit; color: inherit; background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; padding: 2px 6px; margin: 4px 0; max-width: 100%;
}
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
/* A shadow shows on which side there is more to see. */
.scroll {
  --shade: rgba(128, 128, 128, .55);
  overflow: auto; max-height: 32rem; position: relative;
  background:
    linear-gradient(to right, var(--card) 40%, transparent) 0 0 / 40px 100% no-repeat local,
    linear-gradient(to left, var(--card) 40%, transparent) 100% 0 / 40px 100% no-repeat local,
    linear-gradient(to right, var(--shade), transparent) 0 0 / 14px 100% no-repeat scroll,
    linear-gradient(to left, var(--shade), transparent) 100% 0 / 14px 100% no-repeat scroll;
}
.values { font-size: .875rem; }
.values summary { color: var(--quiet); font-weight: 400; }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
caption, summary { text-align: left; font-weight: 600; }
summary { cursor: pointer; }
th, td {
  text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; font-variant-numeric: tabular-nums;
}
td { min-width: 4.5rem; white-space: nowrap; }
td.long { min-width: 17rem; overflow-wrap: anywhere; white-space: normal; }
th { color: var(--quiet); font-weight: 600; white-space: nowrap; }
footer { padding-top: 8px; padding-bottom: 32px; }
@media print {
  :root {
    color-scheme: light;
    --page: #fff; --card: #fff; --text: #000; --quiet: #444; --rule: #bbb; --accent: #000;
    --warning: #933b00;
  }
  body { font-size: 11pt; }
  header, main, footer { max-width: none; padding: 0; }
  @page { margin: 14mm; }
  nav { display: none; }
  section > .quiet { break-after: avoid; }
  .charts { display: block; }
  .charts .card + .card { margin-top: 12px; }
  .card { break-inside: avoid; border-color: #ccc; }
  .card:has(table) { break-inside: auto; }
  .scroll { overflow: visible; max-height: none; background: none; }
  .values { display: none; }
  tr, h2, h3 { break-inside: avoid; break-after: avoid; }
}
"""
SCRIPT = """
"use strict";
const report = (() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const PAPER_PIXELS = 640, LEAST_CELL_PIXELS = 30, MOST_WIDTHS = 3;
  let printing = false;
  const themes = {
    light: {
      c0: "#0072b2", c1: "#d55e00", c2: "#009e73", c3: "#b5679a", c4: "#c98700", c5: "#56b4e9",
      c6: "#5d3a9b", c7: "#8c1c13", c8: "#6b7a00", c9: "#4d4d4d",
      muted: "#9aa1aa", warning: "#d55e00", band: "rgba(0,114,178,0.20)",
      scale: [[0, "#edf4fa"], [1, "#5b9fd3"]],
      text: "#1b1f24", grid: "#e6e9ed", card: "#ffffff",
    },
    dark: {
      c0: "#56b4e9", c1: "#f28e3d", c2: "#3ecf9f", c3: "#e3a0c8", c4: "#e8dc4f", c5: "#b3a5ff",
      c6: "#ff8f80", c7: "#8fe3e8", c8: "#c4d97a", c9: "#d0d0d0",
      muted: "#7f8894", warning: "#f28e3d", band: "rgba(86,180,233,0.25)",
      scale: [[0, "#1c3042"], [1, "#3f7fb5"]],
      text: "#dfe3e8", grid: "#2b323b", card: "#181c22",
    },
  };
  const theme = () => (dark.matches && !printing ? themes.dark : themes.light);

  function painted(value, key) {
    if (typeof value === "string") {
      const colour = /color/.test(key) && value[0] === "@" && theme()[value.slice(1)];
      return colour || value;
    }
    if (Array.isArray(value)) {
      return typeof value[0] === "object" ? value.map((each) => painted(each, "")) : value;
    }
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v, k)]));
  }

  function laidOut(layout) {
    const colours = theme();
    const axis = (own) => ({
      automargin: true, gridcolor: colours.grid, linecolor: colours.muted,
      zerolinecolor: colours.grid, fixedrange: touch.matches, ...own,
    });
    const font = { color: colours.text };
    const label = { bgcolor: colours.card, bordercolor: colours.muted, font };
    return {
      height: 320,
      margin: { l: 48, r: 12, t: 12, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colours.text, size: 12, family: getComputedStyle(document.body).fontFamily },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
      hoverlabel: label, showlegend: true, dragmode: touch.matches ? false : "zoom",
      uirevision: "kept",
      ...layout,
      ...(printing ? { width: PAPER_PIXELS, autosize: false } : { autosize: true }),
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    };
  }

  const buttons = ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"];
  const config = () => ({
    responsive: true, displaylogo: false, modeBarButtonsToRemove: buttons,
    displayModeBar: touch.matches || printing ? false : "hover",
  });

  function chosen(key) {
    const chart = charts[key];
    if (chart.figure) return chart.figure;
    const select = document.querySelector(`select[data-choices="${CSS.escape(key)}"]`);
    return chart.choices[select ? select.value : Object.keys(chart.choices)[0]];
  }

  // Texts of cells that are too narrow for them would be drawn too small to read. A picture that
  // is not much too wide scrolls; the texts of one that is are in its table.
  function widthOf(figure, width) {
    const columns = Math.max(0, ...figure.data.map((t) => (t.type === "heatmap" ? t.x.length : 0)));
    const wanted = columns && LEAST_CELL_PIXELS * (columns + 4);
    return wanted <= MOST_WIDTHS * width ? Math.max(width, wanted) : width;
  }

  function legible(trace, width) {
    if (trace.type !== "heatmap" || width >= LEAST_CELL_PIXELS * (trace.x.length + 4)) return trace;
    return { ...trace, texttemplate: "" };
  }

  function draw(key) {
    const element = document.querySelector(`[data-chart="${CSS.escape(key)}"]`);
    const figure = element && chosen(key);
    if (!figure) return Promise.resolve();
    const room = element.parentElement.clientWidth;
    const width = printing ? PAPER_PIXELS : widthOf(figure, room);
    element.style.width = !printing && width > room ? `${width}px` : "";
    tabulate(key, figure);
    const data = painted(figure.data, "").map((trace) => legible(trace, width));
    return Plotly.react(element, data, laidOut(painted(figure.layout, "")), config());
  }

  // The values of a chart as a table, once somebody opens it: for ears, and for exact numbers.
  function tabulate(key, figure) {
    const details = document.querySelector(`[data-values="${CSS.escape(key)}"]`);
    if (!details || !details.open) return;
    const [head, ...rows] = cellsOf(figure);
    const cells = (tag, texts) => {
      const row = document.createElement("tr");
      for (const text of texts) row.append(document.createElement(tag));
      texts.forEach((text, place) => { row.children[place].textContent = text; });
      return row;
    };
    const table = document.createElement("table");
    table.append(cells("th", head), ...rows.map((row) => cells("td", row)));
    const box = document.createElement("div");
    box.className = "scroll";
    box.tabIndex = 0;
    box.append(table);
    details.querySelector(".scroll")?.remove();
    details.append(box);
  }

  const plain = (text) => new DOMParser().parseFromString(text, "text/html").body.textContent;
  const shown = (value) => (typeof value === "number" ? String(value) : plain(value ?? ""));

  // Rows of texts, the head first: spans one by one, points that have texts likewise, the cells of
  // a picture, and of curves and bars one column each.
  function cellsOf({ data, layout }) {
    const title = (axis) => (layout[axis]?.title?.text ?? "");
    const traces = data.filter((trace) => trace.hoverinfo !== "skip");
    const [first] = traces;
    if (first?.type === "heatmap") {
      const rows = first.y.map((name, row) => [name, ...first.text[row]].map(shown));
      return [[title("xaxis"), ...first.x.map(shown)], ...rows];
    }
    if (first?.base) {
      const spans = traces.flatMap((t) => t.base.map((from, at) =>
        [t.y[at], t.name, t.customdata[at], from, t.x[at]].map(shown)));
      return [["stage", "work", "span", "begins [ms]", "lasts [ms]"], ...spans];
    }
    if (first?.text && first.mode === "markers") {
      const points = first.text.map((name, at) => [name, first.x[at], first.y[at]].map(shown));
      return [["point", title("xaxis"), title("yaxis")], ...points];
    }
    const sideways = traces.some((trace) => trace.orientation === "h");
    const [keys, values, unit] = sideways ? ["y", "x", "xaxis"] : ["x", "y", "yaxis"];
    const rows = new Map();
    traces.forEach((trace, column) => trace[keys].forEach((name, at) => {
      if (!rows.has(name)) rows.set(name, traces.map(() => ""));
      rows.get(name)[column] = trace.text?.[at] || shown(trace[values][at]);
    }));
    const named = [...rows].map(([name, texts]) => [shown(name), ...texts]);
    if (!sideways) named.sort(([a], [b]) => a - b);
    const of = title(unit) && ` [${title(unit)}]`;
    const head = [title(sideways ? "yaxis" : "xaxis"), ...traces.map((t) => plain(t.name) + of)];
    return [head, ...named];
  }

  const drawAll = () => Promise.all(Object.keys(charts).map(draw));

  function show(key, chart) {
    charts[key] = chart;
    return draw(key);
  }

  document.addEventListener("change", (event) => {
    const key = event.target.dataset.choices;
    if (key) draw(key);
  });
  document.addEventListener("toggle", ({ target }) => {
    const key = target.dataset.values;
    if (key && target.open) tabulate(key, chosen(key));
  }, true);
  dark.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => {
    printing = true;
    for (const each of document.querySelectorAll("details:not(.values)")) each.open = true;
    drawAll();
  });
  addEventListener("afterprint", () => {
    printing = false;
    drawAll();
  });
  const ready = drawAll().then(() => document.body.classList.add("drawn"));
  return { charts, draw, drawAll, show, ready };
})();
"""
