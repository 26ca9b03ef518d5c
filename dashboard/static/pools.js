// Pools of storage: how full each is, its use by day, and the band in which it is expected to be full.
//
// Read again every minute: figures are stored every some minutes. The section is hidden while no pool is read.

import {read} from "./api.js";
import {element, fillTable, setBadge, setText} from "./dom.js";
import * as f from "./format.js";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 60000;
const DAY_US = 86400e6;
const AHEAD = 0.5; // of the history: so far the picture goes on
const [WIDTH, HEIGHT] = [760, 160];
const SVG = "http://www.w3.org/2000/svg";
const LEVELS = {ok: ["ok", "✓ ok"], warn: ["warn", "filling up"], critical: ["bad", "✗ nearly full"]};
let selected = null;

const day = (us) => new Date(us / 1000).toISOString().slice(0, 10);
const shape = (tag, attributes) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let power = 0;
  while (Math.abs(bytes) >= 1024 && power < units.length - 1) [bytes, power] = [bytes / 1024, power + 1];
  return power ? `${bytes.toFixed(1)} ${units[power]}` : `${bytes} B`;
}

function fullWords(forecast) {
  if (!forecast) return f.DASH;
  if (!forecast.full_us) return [f.DASH, forecast.reason];
  const latest = forecast.latest_us ? day(forecast.latest_us) : "later";
  return [day(forecast.full_us), `${day(forecast.earliest_us)} to ${latest}`];
}

function showPools(rows) {
  const columns = [
    {label: "Pool", cls: "wrap head", fill: (td, row) => {
      if (!td.firstChild) td.append(element("button", {type: "button", class: "link", onclick: () => select(row.name)}));
      setText(td.firstChild, row.name);
      td.firstChild.setAttribute("aria-pressed", String(row.name === selected));
    }},
    {label: "Level", cls: "head", fill: (td, row) => {
      if (!td.firstChild) td.append(element("span"));
      setBadge(td.firstChild, ...(row.is_stale ? ["warn", "not read"] : LEVELS[row.level] || ["", row.level]));
    }},
    {label: "Full", cls: "num", fill: (td, row) => {
      if (!td.firstChild) td.append(element("meter", {min: 0, max: 1, low: 0.8, high: 0.9, optimum: 0}), " ", element("span"));
      td.firstChild.value = row.full_ratio;
      setText(td.lastChild, f.percent(row.full_ratio));
    }},
    {label: "Used", cls: "num", text: (row) => [size(row.used_bytes), `of ${size(row.size_bytes)}`]},
    {label: "Volumes", cls: "num", text: (row) => row.volume_count
      ? [String(row.volume_count), `may grow to ${size(row.provisioned_bytes)}`] : f.DASH},
    {label: "Expected to be full", cls: "wrap", text: (row) => fullWords(row.forecast)},
  ];
  $("pools-section").hidden = rows.length === 0;
  fillTable($("pools"), columns, rows, (row) => row.name, () => ["No pool of storage is read."]);
}

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

async function select(name) {
  selected = selected === name ? null : name;
  await refreshPools();
}

async function showSelected() {
  const row = selected ? await read(`/pools/${selected.split("/").map(encodeURIComponent).join("/")}`) : null;
  $("pool-trend").hidden = !row;
  if (!row) return;
  drawTrend($("pool-plot"), row);
  const {forecast} = row;
  const words = !forecast ? "no forecast yet" : forecast.full_us
    ? `expected to be full on ${fullWords(forecast)[0]} (band: ${fullWords(forecast)[1]}), at ${size(forecast.slope_bytes_per_day)} a day`
    : `no day is named: ${forecast.reason}`;
  setText($("pool-title"), `${row.name}: use by day (line) below its size (dashed), ${row.days.length} days; ${words}.`);
}

export async function refreshPools() {
  const answer = await read("/pools");
  if (!answer) return;
  showPools(answer.items);
  await showSelected();
}

export function startPools() {
  refreshPools();
  setInterval(() => { if (!document.hidden) refreshPools(); }, REFRESH_MS);
}
