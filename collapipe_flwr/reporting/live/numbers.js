
// Elements, and numbers as short text. Text is only ever set as text: names come from elsewhere.

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function drawing(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Touch the document only where something changed.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, key, value) {
  if (node.getAttribute(key) !== String(value)) node.setAttribute(key, value);
}

const byId = (id) => document.getElementById(id);
const known = (value) => value !== null && value !== undefined;

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 12 }); // slow to make

function digits(value, count = 3) {
  if (!known(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(count - 1);
  return grouped.format(Number(value.toPrecision(count)));
}

function scaled(value, unit, base = 1000) {
  if (!known(value)) return "–";
  const prefixes = ["", "k", "M", "G", "T"];
  let step = 0;
  while (Math.abs(value) >= base && step < prefixes.length - 1) { value /= base; step += 1; }
  return `${digits(value)} ${prefixes[step]}${unit}`;
}

const bytes = (value) => scaled(value, "B");
const rate = (value) => scaled(value, "bit/s");

function joules(value) {
  return known(value) && value !== 0 && Math.abs(value) < 0.1 ? `${digits(1000 * value)} mJ` : `${digits(value)} J`;
}

function seconds(value) {
  if (!known(value)) return "–";
  if (value < 1) return `${digits(1000 * value)} ms`;
  if (value < 120) return `${digits(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}
