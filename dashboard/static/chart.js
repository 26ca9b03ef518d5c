// Latency against promise: a spark line a row, and one large chart (plotly, loaded when first needed).
//
// A trend is {at: [ms], latency: [us|null], promise: [us|null], throttled: [bool]}, 15 minutes at one a second, and
// stepMs, how far apart its points are. A silence is one point of nulls: no line is drawn over it.

import {measuredUs} from "./format.js";
import {wallTime} from "./zone.js";
import {axes, colour, layout, loadPlotly} from "./plot.js";

const KEEP = 900;
const COLUMNS = ["at", "latency", "promise", "throttled"];
const SILENCE_MS = 5000; // as api.stale_after_s; of a large installation points are further apart
const LEAST_MS = 60000; // of the axis, so that the first seconds are not stretched over it
const SVG = "http://www.w3.org/2000/svg";
const trends = new Map();

function trendOf(key) {
  if (!trends.has(key)) trends.set(key, {at: [], latency: [], promise: [], throttled: [], stepMs: 1000});
  return trends.get(key);
}

export const hasTrend = (key) => (trends.get(key)?.at.length || 0) > 0;

export function loadTrend(answer) {
  trends.clear();
  for (const [key, columns] of Object.entries(answer.slas)) {
    answer.at_us.forEach((us, i) =>
      push(trendOf(key), us / 1000, columns.latency_us[i], columns.threshold_us[i], columns.throttled[i]));
  }
}

export function addPoint(key, atUs, row, throttled) {
  push(trendOf(key), atUs / 1000, measuredUs(row), row.threshold_us ?? null, throttled);
}

function push(trend, atMs, latency, promise, throttled) {
  const last = trend.at.at(-1) ?? -Infinity;
  if (last >= atMs) return;
  const stepMs = atMs - last;
  if (trend.at.length && stepMs > Math.max(SILENCE_MS, 3 * trend.stepMs)) append(trend, last + 1, null, null, false);
  else if (trend.at.length) trend.stepMs = stepMs;
  append(trend, atMs, latency, promise, throttled);
}

function append(trend, ...values) {
  COLUMNS.forEach((name, i) => {
    trend[name].push(values[i]);
    if (trend[name].length > KEEP) trend[name].shift();
  });
}

// [first, last] time in ms of what was measured: nothing before the first sample, 15 minutes once they are full.
export function spanMs(key) {
  const {at, latency} = trendOf(key);
  const first = latency.findIndex((value) => value !== null);
  return at.length ? [at[Math.max(0, first)], at.at(-1)] : [Date.now(), Date.now()];
}

// Runs of true as [first, last] indices.
function runs(flags) {
  const found = [];
  flags.forEach((flag, index) => {
    if (!flag) return;
    const last = found.at(-1);
    if (last && last[1] === index - 1) last[1] = index;
    else found.push([index, index]);
  });
  return found;
}

const shape = (tag, attributes) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

export function drawSpark(svg, key, points = 120) {
  const full = trendOf(key);
  const [latency, promise, throttled] = [full.latency, full.promise, full.throttled].map((c) => c.slice(-points));
  const top = Math.max(1, ...latency.map((v) => v ?? 0), ...promise.map((v) => v ?? 0)) * 1.1;
  const x = (index) => (index / (points - 1)) * 190;
  const y = (value) => 37 - (value / top) * 36;
  const line = (values) => values.reduce((d, value, index) => (value === null ? d
    : `${d}${index && values[index - 1] !== null ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`), "");
  svg.replaceChildren(
    ...runs(throttled).map(([a, b]) => shape("rect", {x: x(a), y: 0, width: Math.max(1, x(b) - x(a)), height: 38})),
    shape("path", {d: line(promise), class: "promise"}),
    shape("path", {d: line(latency)}),
  );
}

export async function drawChart(node, key) {
  const Plotly = await loadPlotly();
  const trend = trendOf(key);
  const at = trend.at.map(wallTime);
  const ms = (values) => values.map((value) => (value === null ? null : value / 1000));
  const axis = {...axes(), fixedrange: true};
  const [start, newest] = spanMs(key);
  const end = Math.max(newest, start + LEAST_MS);
  const high = Math.max(1, ...ms(trend.latency), ...ms(trend.promise)) * 1.12;
  await Plotly.react(node, [
    {x: at, y: ms(trend.promise), name: "promised", mode: "lines", connectgaps: false,
      line: {color: colour("soft"), width: 1.5, dash: "dash", shape: "hv"}, hovertemplate: "promised %{y:.1f} ms<extra></extra>"},
    {x: at, y: ms(trend.latency), name: "measured", mode: "lines", connectgaps: false,
      line: {color: colour("accent"), width: 2}, hovertemplate: "%{x|%H:%M:%S}  %{y:.1f} ms<extra></extra>"},
  ], {
    shapes: runs(trend.throttled).map(([a, b]) => ({type: "rect", xref: "x", yref: "paper", y0: 0, y1: 1,
      x0: at[a], x1: at[Math.min(b + 1, at.length - 1)], fillcolor: colour("shade"), line: {width: 0}, layer: "below"})),
    ...layout(),
    xaxis: {...axis, type: "date", range: [wallTime(start), wallTime(end)], tickformat: "%H:%M:%S", nticks: Math.max(3, Math.floor(node.clientWidth / 130)), tickangle: 0, showgrid: false},
    yaxis: {...axis, range: [0, high], nticks: 5, ticksuffix: " ms"},
  }, {displayModeBar: false, responsive: true});
}
