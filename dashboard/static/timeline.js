// When promises were violated and volumes held back, one row each on one axis of time: what came first is to its left.

import {agreementAddress, volumeAddress} from "./cells.js";
import {element} from "./dom.js";
import * as f from "./format.js";

const MOST_EACH = 8; // promises, and volumes: those with the newest bars
const WIDTH = 1000;
const LEAST = 3; // of a bar, so that a second is seen in a day
const SVG = "http://www.w3.org/2000/svg";

const shape = (tag, attributes, ...children) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

// Rows by name, the newest first; each with its bars [{from, to (ms), cls, words}], and how many rows were left out.
function gathered(bars) {
  const rows = new Map();
  for (const bar of bars) {
    if (!rows.has(bar.name)) rows.set(bar.name, {name: bar.name, href: bar.href, bars: []});
    rows.get(bar.name).bars.push(bar);
  }
  const all = [...rows.values()].sort((one, other) => Math.max(...other.bars.map((bar) => bar.to)) - Math.max(...one.bars.map((bar) => bar.to)));
  return {rows: all.slice(0, MOST_EACH), left: Math.max(0, all.length - MOST_EACH)};
}

const during = (from, to, open) => `${f.clock(from * 1000)} to ${open ? "now" : f.clock(to * 1000)}, ${f.duration((to - from) / 1000)}`;

function violations(episodes) {
  return episodes.map((row) => {
    const [from, to] = [row.opened_us / 1000, row.closed_us ? row.closed_us / 1000 : Date.now()];
    return {name: `${row.name}/${row.objective}`, href: agreementAddress(row.name, row.objective), from, to, cls: "violated",
      words: [`violated ${during(from, to, !row.closed_us)}`, f.episodeWords(row)].filter(Boolean).join(": ")};
  });
}

function throttles(rows) {
  return rows.filter((row) => row.state !== "refused" && (row.volume || row.group_name || row.client)).map((row) => {
    const [from, to] = [row.requested_us / 1000, row.released_us ? row.released_us / 1000 : Date.now()];
    const verb = row.state === "observed" ? "would have been held to" : "held to";
    const whom = row.victim ? ` to keep ${row.victim}` : "";
    return {name: f.throttled(row), href: row.volume ? volumeAddress(row.volume) : null, from, to,
      cls: row.state === "observed" ? "observed" : "throttled", words: `${verb} ${f.capWords(row)}${whom}, ${during(from, to, !row.released_us)}`};
  });
}

function line(row, fromMs, toMs) {
  const x = (ms) => (Math.max(fromMs, Math.min(toMs, ms)) - fromMs) / (toMs - fromMs) * WIDTH;
  const bars = row.bars.map((bar) => {
    const width = Math.max(LEAST, x(bar.to) - x(bar.from));
    return shape("rect", {class: bar.cls, x: Math.min(x(bar.from), WIDTH - width).toFixed(1), y: 2, width: width.toFixed(1), height: 12},
      shape("title", {}, bar.words));
  });
  const said = row.bars.map((bar) => bar.words).slice(0, 5).join("; ");
  return element("tr", {}, element("th", {scope: "row"}, row.href ? element("a", {href: row.href}, row.name) : row.name),
    element("td", {}, shape("svg", {viewBox: `0 0 ${WIDTH} 16`, preserveAspectRatio: "none", role: "img", "aria-label": said}, ...bars)));
}

// table: gets the rows; note: what they are, or that there are none. episodes and rows: of the API, the newest first.
export function drawTimeline(table, note, {episodes, rows, fromMs, toMs, isPast, isCut}) {
  const inside = (bar) => bar.to >= fromMs && bar.from <= toMs;
  const [broken, held] = [violations(episodes), throttles(rows)].map((bars) => gathered(bars.filter(inside)));
  const all = [...broken.rows, ...held.rows];
  const text = JSON.stringify([all, isPast, Math.round(fromMs / 5000)]);
  if (table.dataset.shown === text) return;
  table.dataset.shown = text;
  const focused = table.contains(document.activeElement) && document.activeElement.getAttribute("href");
  table.hidden = !all.length;
  const ticks = [0, 0.25, 0.5, 0.75].map((share) => element("span", {}, f.clockOf((fromMs + share * (toMs - fromMs)) * 1000)));
  table.replaceChildren(element("tbody", {}, ...all.map((row) => line(row, fromMs, toMs)),
    element("tr", {class: "ticks"}, element("th", {}), element("td", {}, element("div", {}, ...ticks, element("span", {}, isPast ? f.clock(toMs * 1000) : "now"))))));
  if (focused) [...table.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
  const left = broken.left + held.left;
  note.replaceChildren(...(all.length ? [element("span", {class: "swatch violated"}), " violated ", element("span", {class: "swatch throttled"}), " held back ",
    element("span", {class: "swatch observed"}), " would have been held back", left ? `; ${f.plural(left, "more row")} left out` : "",
    isCut ? "; more happened in this time than is shown, and the oldest of it is missing: choose a shorter time" : ""]
    : ["No promise was violated and nobody was held back in this time."]));
}
