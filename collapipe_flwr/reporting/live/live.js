// Takes in what the server tells, and keeps the page up to date.

const SILENT_MS = 15000; // without a word, the connection is dead
const AGAIN_MS = 2000;

const run = { head: {}, last: null };
const cards = new Map();
const shown = new Set(); // cards on the screen: others are drawn when they get there
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const card = cards.get(entry.target.dataset.cluster);
    if (!card) continue;
    if (!entry.isIntersecting) { shown.delete(card); continue; }
    shown.add(card);
    if (card.stale && card.data) card.draw();
  }
}, { rootMargin: "200px" });

function take(news) {
  const before = run.head;
  run.head = news.head;
  run.offset_ms = Date.now() - 1000 * news.sent_s;
  run.last = news.last;
  run.rounds = news.rounds;
  if (news.clusters) {
    tellIncidents(news.incidents);
    drawClusters(news.clusters);
  }
  drawHead();
  drawTiles();
  drawProgress();
  if (news.clusters || run.head.status !== before.status) figures.refresh();
}

function drawClusters(clusters) {
  const there = new Set(clusters.map((cluster) => cluster.id));
  for (const [id, card] of cards) if (!there.has(id)) remove(id, card);
  let added = false;
  for (const cluster of clusters) {
    let card = cards.get(cluster.id);
    if (!card) {
      card = new Card(cluster.id);
      cards.set(cluster.id, card);
      added = true;
      sight.observe(card.root);
    }
    card.set(cluster);
    if (shown.has(card)) card.draw();
  }
  if (added && cards.size <= OPEN_AT_MOST) cards.forEach((card) => card.turn(true));
  arrange();
}

function remove(id, card) {
  sight.unobserve(card.root);
  card.root.remove();
  shown.delete(card);
  cards.delete(id);
}

const ORDERS = {
  name: (a, b) => naturally(a.id, b.id),
  slow: (a, b) => (b.data.latency_s || 0) - (a.data.latency_s || 0) || naturally(a.id, b.id),
  queue: (a, b) => longestQueue(b.data) - longestQueue(a.data) || naturally(a.id, b.id),
  trouble: (a, b) => b.data.lost - a.data.lost || naturally(a.id, b.id),
};

function arrange() {
  const wanted = byId("find").value.trim().toLowerCase();
  const matches = (card) => !wanted || card.id.toLowerCase().includes(wanted)
    || everyDevice(card.data).some((device) => device.name.toLowerCase().includes(wanted));
  const sorted = [...cards.values()].sort(ORDERS[byId("order").value]);
  const parent = byId("clusters");
  let place = parent.firstChild;
  for (const card of sorted) {
    card.root.hidden = !matches(card);
    if (card.root === place) place = place.nextSibling;
    else parent.insertBefore(card.root, place);
  }
  byId("legend").hidden = cards.size === 0;
}

function drawHead() {
  const { head } = run;
  const status = head.status || "waiting";
  setText(byId("name"), head.name || "CollaPipe");
  document.title = `${head.name || "CollaPipe"}: ${status}`;
  setText(byId("status"), status);
  byId("status").className = `pill ${status}`;
  document.body.classList.toggle("running", status === "running");
  const trouble = head.broken || (["failed", "stopped", "interrupted"].includes(status) ? head.reason : "");
  setText(byId("notice"), trouble || "");
  byId("notice").hidden = !trouble;
  const done = run.last ? run.last.round : 0;
  const bar = byId("done");
  bar.hidden = !head.rounds_asked;
  setAttribute(bar, "aria-valuemax", head.rounds_asked || 0);
  setAttribute(bar, "aria-valuenow", done);
  const told = Object.values(head.progress?.clusters || {});
  const all = told.reduce((sum, cluster) => sum + cluster.of, 0);
  const part = head.progress?.round_index > done && all ? told.reduce((sum, cluster) => sum + cluster.trained, 0) / all : 0;
  bar.firstChild.style.width = head.rounds_asked ? `${(100 * (done + part)) / head.rounds_asked}%` : "0";
  const waits = { waiting: "There is no such run yet; the page begins with it.", starting: "The run is being prepared: waiting for its first round." };
  const nothing = waits[status] || (cards.size ? "" : run.last ? "The rounds of this run have no plan: clusters train whole models." : "Waiting for the end of the first round: until then, this is what is known.");
  setText(byId("nobody"), nothing);
  byId("nobody").hidden = !nothing;
  drawMembers(head);
}

// Who takes part, and what is planned for the round that has not ended, before there are cards.
function drawMembers({ members, config, progress }) {
  const told = progress?.clusters || {};
  const items = run.last ? [] : Object.entries(members || {}).map(([name, devices]) => {
    const { of, examples, predicted_s } = told[name] || {};
    const planned = of ? `; planned: ${digits(of)} micro-batches${examples ? ` of ${digits(examples)}` : ""}${known(predicted_s) ? `, predicted ${seconds(predicted_s)}` : ""}` : "; waiting for its first plan";
    return `${name}: ${devices.join(", ")}${planned}`;
  });
  const devices = (config || {})["world.devices"];
  if (!run.last && !items.length && devices) items.push(`simulated devices: ${devices}`);
  const list = byId("known");
  while (list.children.length > items.length) list.lastChild.remove();
  items.forEach((text, index) => {
    if (!list.children[index]) list.append(element("li"));
    setText(list.children[index], text);
  });
  list.hidden = !items.length;
}

// What goes on inside the round that has not ended.
function drawProgress() {
  const { progress } = run.head;
  const clusters = Object.entries((progress && progress.clusters) || {});
  let text = "";
  if (progress && progress.phase) {
    const done = clusters.reduce((sum, [, told]) => sum + (told.trained || told.tested), 0);
    const all = clusters.reduce((sum, [, told]) => sum + told.of, 0);
    const round = progress.round_index ? `Round ${progress.round_index}: ` : "";
    text = `${round}${progress.phase}${all ? `, ${digits(done)} of ${digits(all)} micro-batches` : ""}`;
  }
  setText(byId("phase"), text);
  byId("phase").hidden = !text;
  const told = new Map(clusters);
  for (const card of cards.values()) {
    const found = told.get(card.id);
    card.progress(found && { ...found, at_s: progress.at_s });
  }
}

function drawTiles() {
  const { last, head } = run;
  const tiles = last ? roundTiles(last, head) : firstTiles(head);
  showTiles(byId("tiles"), tiles);
  const behind = last && run.rounds < last.round ? `; rounds before it are being read: ${run.rounds} so far` : "";
  setText(byId("drawn"), last ? `as of round ${last.round}${behind}` : "");
}

// What a run-config and the untrained model tell before the first round has ended.
function firstTiles({ config, members, rounds_asked, untrained }) {
  const set = config || {};
  const devices = Object.values(members || {}).flat().length;
  const scores = Object.entries(untrained || {}).slice(0, 2);
  return [
    [known(rounds_asked) ? `0 of ${rounds_asked}` : set["num-server-rounds"], "rounds"],
    [set.clusters, devices ? `clusters, ${digits(devices)} members in all` : "clusters"],
    [set["model.pretrained"] || set["model.type"], "model"],
    [set["data.task"], `task${set["data.train"] ? `, from ${set["data.train"]}` : ""}`],
    [set.strategy, "strategy"],
    [set["scheduler.policy"], "scheduler"],
    ...scores.map(([name, value]) => [digits(value, 4), `test ${name}, untrained`]),
  ].filter(([value]) => known(value) && value !== "");
}

function showTiles(parent, tiles) {
  const rows = Math.max(1, Math.ceil(tiles.length / 7));
  parent.style.setProperty("--columns", Math.ceil(tiles.length / rows) || 1);
  while (parent.children.length > tiles.length) parent.lastChild.remove();
  tiles.forEach(([value, label, warning], index) => {
    if (!parent.children[index]) parent.append(element("div", "card tile", element("div", "value"), element("div", "quiet")));
    const [large, small] = parent.children[index].children;
    setText(large, value);
    setText(small, label);
    large.classList.toggle("warning", Boolean(warning));
  });
}

function roundTiles(last, head) {
  const data = [...cards.values()].map((card) => card.data);
  const perSecond = data.reduce((sum, cluster) => sum + (cluster.per_s || 0), 0);
  const measured = data.some((cluster) => cluster.measured);
  const scores = Object.entries(last.metrics || {}).filter(([name]) => name !== "loss").slice(0, 2);
  return [
    [`${last.round}${head.rounds_asked ? ` of ${head.rounds_asked}` : ""}`, "rounds"],
    [digits(last.loss, 4), "training loss"],
    ...scores.map(([name, value]) => [digits(value, 4), `test ${name}${known(head.untrained?.[name]) ? `, untrained ${digits(head.untrained[name])}` : ""}`]),
    ...(known(last.latency_s) ? [[seconds(last.latency_s), `round, ${measured ? "measured" : "simulated"}; predicted ${seconds(last.predicted_s)}`]] : []),
    [seconds(last.wall_s), "round, wall clock"],
    ...(perSecond ? [[digits(perSecond), `micro-batches/s${measured ? "" : " simulated"}, all clusters`]] : []),
    ...(known(last.queue) ? [[digits(last.queue), "longest energy queue, in budgets"]] : []),
    [bytes(Object.values(last.bytes || {}).reduce((sum, value) => sum + value, 0) - ((last.bytes || {}).spared || 0)), "sent in the round"],
  ];
}

function tellIncidents(incidents) {
  const rows = incidents.map((told) => element("li", "", element("b", "", `round ${told.round}`), told.cluster && !told.text.startsWith(told.cluster) ? `${told.cluster}: ${told.text}` : told.text));
  byId("happened").replaceChildren(...rows.reverse());
  byId("latest").hidden = !rows.length;
}

// The connection. Each one begins with all that there is, so nothing is lost where one breaks off.
let source = null;
let heard_ms = 0;

function connect() {
  source?.close();
  source = new EventSource(`events${location.search}`);
  heard_ms = Date.now();
  source.onopen = () => { heard_ms = Date.now(); tellLink(true); };
  source.addEventListener("ping", () => { heard_ms = Date.now(); tellLink(true); });
  source.onmessage = (message) => {
    const begin = performance.now();
    heard_ms = Date.now();
    const news = JSON.parse(message.data);
    take(news);
    tellLink(true);
    performance.measure("collapipe:update", { start: begin });
    const detail = news.clusters ? "clusters" : "";
    requestAnimationFrame(() => setTimeout(() => performance.measure("collapipe:shown", { start: begin, detail })));
  };
  source.onerror = () => tellLink(false);
}

function tellLink(there) {
  const link = byId("link");
  link.classList.toggle("away", !there);
  const changed = run.head.changed_s ? (Date.now() - run.offset_ms) / 1000 - run.head.changed_s : null;
  const news = known(changed) && run.last && run.head.status === "running" ? `, last round ${seconds(Math.max(0, Math.round(changed)))} ago` : "";
  setText(link, there ? `${run.head.status === "running" ? "live" : "connected"}${news}` : "no connection to collapipe watch; trying again");
}

function lookAfterLink() {
  if (document.hidden) return;
  const closed = source.readyState === EventSource.CLOSED;
  if (closed || Date.now() - heard_ms > SILENT_MS) connect();
  tellLink(source.readyState === EventSource.OPEN);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) source.close();
  else connect();
});
byId("find").addEventListener("input", arrange);
byId("order").addEventListener("change", arrange);
setInterval(lookAfterLink, AGAIN_MS);
connect();
