// The picture of the clusters. A card shows a strip; an open one its chain of stages and hops.

const QUEUE_FULL = 5; // budgets of a round
const OPEN_AT_MOST = 4; // clusters that are open from the start
const naturally = new Intl.Collator("en", { numeric: true }).compare;

const queueOf = (device) => Math.max(0, device.budget_j ? (device.queue_j || 0) / device.budget_j : 0);
const longestQueue = (cluster) => Math.max(0, ...everyDevice(cluster).map(queueOf));
const everyDevice = (cluster) => [...cluster.stages.flatMap((stage) => stage.devices), ...cluster.idle];

// What decides whether a card is drawn anew or only its numbers change.
const shapeOf = (cluster) => JSON.stringify([
  cluster.stages.map((stage) => [stage.blocks, stage.devices.map((device) => device.name)]),
  cluster.idle.map((device) => device.name),
]);

class Card {
  constructor(id) {
    this.id = id;
    this.open = false;
    this.stale = true;
    this.name = element("b", "", id);
    this.alarm = element("span", "alarm");
    this.rate = element("span", "rate");
    this.took = element("span", "took");
    this.button = element("button", "", this.name, this.alarm, this.rate, this.took);
    this.button.type = "button";
    this.button.addEventListener("click", () => this.turn(!this.open));
    this.within = element("div", "within", element("div"));
    this.body = element("div", "body");
    this.root = element("article", "cluster", this.button, this.within, this.body);
    this.root.dataset.cluster = id;
    this.within.hidden = true;
    this.turn(false);
  }

  turn(open) {
    this.open = open;
    this.root.classList.toggle("open", open);
    this.button.setAttribute("aria-expanded", open);
    this.shape = null;
    if (this.data) this.draw();
  }

  set(data) {
    this.data = data;
    this.stale = true;
  }

  draw() {
    const { data } = this;
    this.stale = false;
    this.root.classList.toggle("lost", data.lost);
    setText(this.alarm, data.lost ? "no result" : "");
    setText(this.rate, known(data.per_s) ? `${digits(data.per_s)} micro-batches/s${data.measured ? "" : " simulated"}` : "");
    setText(this.took, known(data.latency_s) ? seconds(data.latency_s) : "");
    const shape = shapeOf(data);
    if (shape !== this.shape) {
      this.shape = shape;
      this.drawn = this.open ? new Chain(data) : new Strip(data);
      this.body.replaceChildren(this.drawn.root);
    }
    this.drawn.set(data);
  }

  // Inside a round: the micro-batches that are done, and how many a second are.
  progress(told) {
    this.within.hidden = !told || !told.of;
    if (this.within.hidden) { this.before = null; return; }
    const { trained, at_s } = told;
    if (!this.before || trained < this.before.trained) this.before = { trained, at_s };
    const took_s = at_s - this.before.at_s;
    this.within.firstChild.style.width = `${Math.min(100, (100 * trained) / told.of)}%`;
    this.within.title = `${trained} of ${told.of} micro-batches`;
    const now = took_s > 0 && trained > this.before.trained ? `, ${digits((trained - this.before.trained) / took_s)}/s` : "";
    setText(this.rate, `${trained} of ${told.of} micro-batches${now}`);
  }
}

// All stages in one line: as wide as their blocks, filled as far as they are busy.
class Strip {
  constructor(cluster) {
    this.root = drawing("svg", { class: "strip", viewBox: "0 0 1000 30", preserveAspectRatio: "none", role: "img" });
    const held = cluster.stages.filter((stage) => stage.blocks);
    const columns = held.flatMap((stage) => stage.devices.map(() => (stage.blocks[1] - stage.blocks[0]) / stage.devices.length));
    const total = columns.reduce((sum, width) => sum + width, 0) || 1;
    let left = 0;
    this.cells = columns.map((blocks) => {
      const x = (1000 * left) / total;
      const width = Math.max(2, (1000 * blocks) / total - 6);
      left += blocks;
      const cell = {
        width,
        hold: drawing("rect", { class: "hold", x, width, y: 0, height: 20, rx: 3 }),
        busy: drawing("rect", { class: "busy", x, width: 0, y: 0, height: 20, rx: 3 }),
        queue: drawing("rect", { class: "queue", x, width: 0, y: 24, height: 6, rx: 3 }),
        title: drawing("title", {}),
      };
      this.root.append(drawing("g", {}, cell.hold, cell.busy, cell.queue, cell.title));
      return cell;
    });
  }

  set(cluster) {
    const held = cluster.stages.filter((stage) => stage.blocks);
    const rows = held.flatMap((stage) => stage.devices.map((device) => [stage, device]));
    rows.forEach(([stage, device], index) => {
      const cell = this.cells[index];
      setAttribute(cell.busy, "width", Math.round(cell.width * Math.min(1, device.share || 0)));
      setAttribute(cell.queue, "width", Math.round(cell.width * Math.min(1, queueOf(device) / QUEUE_FULL)));
      setText(cell.title, `${device.name}: ${blocksText(stage)}, ${busyText(device)}, ${queueText(device)}`);
    });
    setAttribute(this.root, "aria-label", `${rows.length} devices with blocks`);
  }
}

// Stage by stage, with the hop to the next one; wraps where a line ends.
class Chain {
  constructor(cluster) {
    const last = Math.max(1, ...cluster.stages.map((stage) => (stage.blocks ? stage.blocks[1] : 0)));
    this.stages = cluster.stages.map((stage) => stage.devices.map((device) => new Device(device, stage.blocks, last)));
    this.hops = cluster.hops.map(() => new Hop());
    const links = this.stages.map((devices, index) => {
      const stage = element("div", "stage", ...devices.map((device) => device.root));
      const hop = this.hops[index];
      return element("div", "link", stage, ...(hop ? [hop.root] : []));
    });
    this.idle = element("p", "idle");
    this.plan = element("p", "idle");
    this.root = element("div", "", element("div", "chain", ...links), this.idle, this.plan);
  }

  set(cluster) {
    cluster.stages.forEach((stage, index) => stage.devices.forEach((device, place) => this.stages[index][place].set(device, stage)));
    cluster.hops.forEach((hop, index) => this.hops[index].set(hop));
    setText(this.idle, cluster.idle.filter((device) => !isEdge(device)).map((d) => `${d.name} without blocks, ${queueText(d)}`).join("; "));
    this.idle.hidden = !this.idle.textContent;
    setText(this.plan, known(cluster.micro_batches)
      ? `round ${cluster.round}: ${cluster.local_steps} steps of ${cluster.micro_batches} micro-batches of ${cluster.micro_batch_size}; predicted ${seconds(cluster.predicted_s)}`
      : `round ${cluster.round}: no plan`);
    this.root.style.setProperty("--beat", `${Math.min(4, Math.max(0.25, 1 / (cluster.per_s || 1)))}s`);
  }
}

class Device {
  constructor(device, blocks, last) {
    this.blocks = element("small");
    this.busy = element("small");
    this.queue = element("small");
    this.memory = element("small");
    this.busyBar = shareBar("busy");
    this.queueBar = shareBar("queue");
    const where = shareBar("where");
    if (blocks) {
      where.bar.setAttribute("x", (1000 * blocks[0]) / last);
      where.bar.setAttribute("width", (1000 * (blocks[1] - blocks[0])) / last);
    }
    this.root = element("div", "device", element("b", "", device.name), this.blocks);
    if (blocks) this.root.append(where.root);
    this.root.append(this.busy, this.busyBar.root);
    if (known(device.queue_j)) this.root.append(this.queue, this.queueBar.root);
    this.root.append(this.memory);
    this.root.dataset.device = device.name;
  }

  set(device, stage) {
    setText(this.blocks, blocksText(stage));
    setText(this.busy, busyText(device));
    setAttribute(this.busyBar.bar, "width", Math.round(1000 * Math.min(1, device.share || 0)));
    setText(this.queue, queueText(device));
    this.queue.classList.toggle("over", queueOf(device) >= QUEUE_FULL);
    setAttribute(this.queueBar.bar, "width", Math.round(1000 * Math.min(1, queueOf(device) / QUEUE_FULL)));
    setText(this.memory, known(device.peak_bytes) ? `measured peak ${bytes(device.peak_bytes)}` : "");
    const energy = known(device.energy_j) ? `${joules(device.energy_j)} in the round, ${device.metered ? "metered" : "modelled"}; ` : "";
    this.root.title = `${energy}planned peak ${bytes(device.planned_bytes)}; expected ${seconds(device.expected_s)} per micro-batch`;
  }
}

class Hop {
  constructor() {
    this.there = element("small");
    this.back = element("small");
    const line = { x1: 0, x2: 100, y1: 6, y2: 6 };
    this.moving = drawing("line", { ...line, class: "moving" });
    const svg = drawing("svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" }, drawing("line", line), this.moving);
    this.root = element("div", "hop", this.there, svg, this.back);
  }

  set(hop) {
    for (const [node, way, arrow] of [[this.there, hop.forward, "→"], [this.back, hop.backward, "←"]]) {
      const measured = known(way.bit_per_s);
      setText(node, known(way.bit_per_s ?? way.planned) ? `${arrow} ${rate(way.bit_per_s ?? way.planned)}` : arrow);
      node.classList.toggle("planned", !measured);
      node.title = `${measured ? "measured" : "not timed"}; planned ${rate(way.planned)}`;
    }
    this.root.title = `${hop.codec || "unknown codec"}, ${bytes(hop.bytes)} in the round`;
  }
}

function shareBar(kind) {
  const bar = drawing("rect", { class: kind, x: 0, y: 0, width: 0, height: 6 });
  return { bar, root: drawing("svg", { class: "share", viewBox: "0 0 1000 6", preserveAspectRatio: "none", "aria-hidden": "true" }, bar) };
}

const isEdge = (device) => /^edge( |$)/.test(device.name); // its id follows where there are several

function blocksText(stage) {
  if (!stage.blocks) return isEdge(stage.devices[0]) ? "head and loss" : "data and embedding";
  const [first, stop] = stage.blocks;
  return stop - first === 1 ? `block ${first}` : `blocks ${first}–${stop - 1}`;
}

const busyText = (device) => (known(device.share) ? `busy ${digits(100 * device.share, 2)} %` : "not timed");

function queueText(device) {
  if (!known(device.queue_j)) return "";
  if (device.queue_j < 0) return `saved ${joules(-device.queue_j)}`;
  return device.queue_j === 0 ? "queue empty" : `queue ${joules(device.queue_j)}`;
}
