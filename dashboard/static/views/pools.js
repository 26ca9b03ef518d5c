// Pools of storage: how full each is, its use by day, and the band in which it is expected to be full.
//
// Read again every minute: figures are stored every some minutes. The pool whose trend is shown is in the address.

import {read} from "../api.js";
import {volumeAddress} from "../cells.js";
import {element, fillList, fillTable, setBadge, setText} from "../dom.js";
import * as f from "../format.js";
import {startList} from "../list.js";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 60000;
const DAY_US = 86400e6;
const AHEAD = 0.5; // of the history: so far the picture goes on
const [WIDTH, HEIGHT] = [760, 160];
const SVG = "http://www.w3.org/2000/svg";
const LEVELS = {ok: ["ok", "✓ ok"], warn: ["warn", "filling up"], critical: ["bad", "✗ nearly full"]};
const MOST_VOLUMES = 50;
const MOST_ACTIONS = 20;
let list = null;

const shape = (tag, attributes) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

function fullWords(forecast) {
  if (!forecast) return f.DASH;
  if (!forecast.full_us) return [f.DASH, forecast.reason];
  const latest = forecast.latest_us ? f.day(forecast.latest_us) : "later";
  return [f.day(forecast.full_us), `${f.day(forecast.earliest_us)} to ${latest}`];
}

const columns = [
  {label: "Pool", cls: "wrap head", sort: "name", fill: (td, row) => {
    if (!td.firstChild) td.append(element("button", {type: "button", class: "link", onclick: () => select(row.name)}));
    setText(td.firstChild, row.name);
    td.firstChild.setAttribute("aria-pressed", String(row.name === selected()));
  }},
  {label: "Level", cls: "head", fill: (td, row) => {
    if (!td.firstChild) td.append(element("span"));
    setBadge(td.firstChild, ...(row.is_stale ? ["warn", "not read"] : LEVELS[row.level] || ["", row.level]));
  }},
  {label: "Full", cls: "num", sort: "fullest", falls: true, fill: (td, row) => {
    if (!td.firstChild) td.append(element("meter", {min: 0, max: 1, low: 0.8, high: 0.9, optimum: 0}), " ", element("span"));
    td.firstChild.value = row.full_ratio;
    setText(td.lastChild, f.percent(row.full_ratio));
  }},
  {label: "Used", cls: "num", text: (row) => [f.size(row.used_bytes), `of ${f.size(row.size_bytes)}`]},
  {label: "Volumes", cls: "num", text: (row) => row.volume_count
    ? [f.count(row.volume_count), `may grow to ${f.size(row.provisioned_bytes)}`] : f.DASH},
  {label: "Expected to be full", cls: "wrap", sort: "soonest", text: (row) => fullWords(row.forecast)},
];

function path(points) {
  return points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// History as a line; from its end to the size of the pool a band between the earliest and the latest day.
export function drawTrend(svg, row) {
  const days = row.days;
  if (days.length < 2) return svg.replaceChildren();
  const [first, last] = [days[0].day_us, days.at(-1).day_us];
  const {full_us: full, earliest_us: earliest, latest_us: latest} = row.forecast || {};
  const end = Math.max(last + AHEAD * (last - first), ...(full ? [Math.min(full, last + 2 * (last - first)) + DAY_US] : []));
  const top = Math.max(row.size_bytes, ...days.map((one) => one.size_bytes));
  const x = (us) => (us - first) / (end - first) * WIDTH;
  const y = (bytes) => HEIGHT - 4 - bytes / top * (HEIGHT - 12);
  const now = [x(last), y(days.at(-1).used_bytes)];
  const at = (us) => [x(us), y(row.size_bytes)];
  const far = (us) => us ?? end + 4 * (end - first); // beyond what can be said: nearly flat
  svg.replaceChildren(
    shape("path", {d: path([[0, y(row.size_bytes)], [WIDTH, y(row.size_bytes)]]), class: "promise"}),
    ...(full ? [
      shape("path", {d: `${path([now, at(earliest), at(far(latest))])}Z`, class: "band"}),
      shape("path", {d: path([now, at(full)]), class: "promise"}),
    ] : []),
    shape("path", {d: path(days.map((one) => [x(one.day_us), y(one.used_bytes)]))}),
  );
}

const selected = () => list.address.get().pool;
const select = (name) => list.address.go({pool: selected() === name ? "" : name});

async function showSelected() {
  const name = selected();
  const row = name ? await read(`/pools/${name.split("/").map(encodeURIComponent).join("/")}`) : null;
  if (name !== selected()) return;
  $("pool-trend").hidden = !row;
  if (!row) return;
  setText($("h-pool"), row.name);
  drawTrend($("pool-plot"), row);
  const {forecast} = row;
  const words = !forecast ? "no forecast yet" : forecast.full_us
    ? `expected to be full on ${fullWords(forecast)[0]} (band: ${fullWords(forecast)[1]}), at ${f.size(forecast.slope_bytes_per_day)} a day`
    : `no day is named: ${forecast.reason}`;
  setText($("pool-title"), `${row.name}: use by day (line) below its size (dashed), ${row.days.length} days; ${words}.`);
  showVolumes(row.volumes);
  showActions(row.actions);
}

function showVolumes(rows) {
  fillTable($("pool-volumes"), [
    {label: "Name", cls: "wrap head", text: (one) => one.name},
    {label: "Size", cls: "num", text: (one) => f.size(one.size_bytes)},
    {label: "Used", cls: "num", text: (one) => (one.used_bytes == null ? f.DASH : f.size(one.used_bytes))},
    {label: "Served as", cls: "wrap full", fill: (td, one) => {
      if (!td.firstChild) td.append(one.volume ? element("a", {href: volumeAddress(one.volume)}, one.volume) : element("span"));
      if (!one.volume) setText(td.firstChild, one.unused_since_us ? `nobody: neither served nor open for ${f.duration(Date.now() / 1000 - one.unused_since_us / 1e6)}` : "no volume");
    }},
  ], rows.slice(0, MOST_VOLUMES), (one) => one.name, () => ["No volume in it is known."]);
}

function showActions(rows) {
  fillList($("pool-actions"), rows.slice(0, MOST_ACTIONS), (one) => one.action_id,
    () => element("li", {}, element("time", {class: "soft"}), " ", element("span")),
    (li, one) => {
      setText(li.firstChild, f.clock(one.at_us));
      setText(li.lastChild, `${one.action}, ${one.state}: ${one.text}`);
    }, () => ["Nothing. Rules say what is done when it fills up: docs/operations/space.md."]);
}

export function start() {
  list = startList({path: "/pools", id: "pools", columns, keyOf: (row) => row.name, refreshMs: REFRESH_MS,
    fields: {match: "", level: "", sort: "fullest", offset: "0", pool: ""}, mine: ["pool"], onShow: () => list && showSelected(),
    empty: () => ["No pool of storage is read. Name some in the agent's configuration, ",
      element("code", {}, "[[space.source]]"), ", or in the server's: docs/operations/space.md."]});
  showSelected();
  setInterval(() => { if (!document.hidden) showSelected(); }, REFRESH_MS);
}
