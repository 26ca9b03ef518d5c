// Charts by plotly, which is loaded when the first one is drawn. Colours are those of the page's scheme.

import {element} from "./dom.js";
import {wallTime} from "./zone.js";

// Plotly fills style elements of its own, which the content security policy refuses, unless elements of these ids
// are there already: page.css has the rules that our charts need. The second one is that of maps, which we do not draw.
const STYLES = ["plotly.js-style-global", "9f215cf04c5486422605d13261cb87401f4e7763b6296af81e98efbc0130da53"];

let plotly = null;
export function loadPlotly() {
  plotly ||= new Promise((resolve, reject) => {
    document.head.append(...STYLES.map((id) => element("meta", {id, class: "no-inline-styles"})));
    const script = document.createElement("script");
    script.src = "/static/plotly.min.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = reject;
    document.head.append(script);
  });
  return plotly;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const axes = () => ({gridcolor: colour("line"), linecolor: colour("line"), zeroline: false});
export const layout = () => ({margin: {l: 54, r: 8, t: 8, b: 26}, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
  showlegend: false, font: {family: "system-ui, DejaVu Sans, sans-serif", size: 12, color: colour("soft")}, hovermode: "closest"});

// What of a chart's time is asked for, and where somebody has zoomed in. Plotly itself would go back to all of it with
// each point that a live range moves on by.
const views = new WeakMap();

function viewOf(node, keep, from, to) {
  const view = views.get(node) || {};
  views.set(node, view);
  if (view.keep !== keep) view.zoomed = null;
  return Object.assign(view, {keep, asked: [wallTime(from), wallTime(to)]});
}

const DOUBLE_CLICK_MS = 500; // as desktops have it; plotly's 300 are too short for some hands and for a loaded machine
const LINES = ["accent", "warn", "bad", "ok"];

// lines: [{name, at: [ms], values: [number|null], dash, steps, colour}]; a gap in the values is a gap in the line.
// bars: [{name, at, widths: [ms], values, colour}], one on the other. from, to: of the axis, ms; bands: [{from, to, text}]
// behind the lines. Dragging zooms, a double click shows all; who has zoomed in stays there while the chart is drawn again,
// until `keep` is another one.
export async function drawLines(node, lines, {from, to, suffix = "", most, least = 0, bands = [], bars = [], keep = "",
  legend = lines.length + bars.length > 1}) {
  const Plotly = await loadPlotly();
  const view = viewOf(node, keep, from, to);
  const stack = bars.map((bar) => ({type: "bar", x: bar.at.map(wallTime), y: bar.values, width: bar.widths, offset: 0, name: bar.name,
    marker: {color: colour(bar.colour), line: {width: 0}}, hovertemplate: `%{y:.4~g}${suffix}<extra>${bar.name}</extra>`}));
  const heights = bars.length ? bars[0].values.map((_, index) => bars.reduce((sum, bar) => sum + (bar.values[index] ?? 0), 0)) : [];
  const traces = lines.map((line, index) => ({x: line.at.map(wallTime), y: line.values, name: line.name,
    mode: "lines", connectgaps: false, hovertemplate: `%{x|%d %b %H:%M}  %{y:.4~g}${suffix}<extra>${line.name}</extra>`,
    line: {color: colour(line.colour || LINES[index % LINES.length]), width: line.dash ? 1.5 : 2, dash: line.dash ? "dash" : "solid",
      shape: line.steps ? "hv" : "linear"}}));
  const top = most ?? Math.max(1e-9, ...heights, ...lines.flatMap((line) => line.values.map((value) => value ?? 0))) * 1.1;
  await Plotly.react(node, [...stack, ...traces], {...layout(), showlegend: legend, hovermode: "x", barmode: "stack", bargap: 0,
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal"}, margin: {l: 60, r: 8, t: legend ? 30 : 8, b: 42},
    shapes: bands.map((band) => ({type: "rect", xref: "x", yref: "paper", y0: 0, y1: 1, x0: wallTime(band.from), x1: wallTime(band.to),
      fillcolor: colour("shade"), line: {width: 0}, layer: "below"})),
    xaxis: {...axes(), type: "date", range: view.zoomed || view.asked, nticks: Math.max(3, Math.floor(node.clientWidth / 130)),
      tickangle: 0, showgrid: false},
    yaxis: {...axes(), range: [least, top], nticks: 5, ticksuffix: suffix, fixedrange: true},
  }, {displayModeBar: false, responsive: true, doubleClick: false, doubleClickDelay: DOUBLE_CLICK_MS});
  if (view.isFollowed) return;
  view.isFollowed = true;
  node.on("plotly_relayout", (changes) => {
    if ("xaxis.range[0]" in changes) view.zoomed = [changes["xaxis.range[0]"], changes["xaxis.range[1]"]];
  });
  node.on("plotly_doubleclick", () => {
    view.zoomed = null;
    Plotly.relayout(node, {"xaxis.range": view.asked});
  });
}

const CURVE_STEPS = 80;

// points: [[load, share of the promised latency, isotonic fit]]; queueing: [base, slope, limit] or null; capacity and load
// in weighted I/Os a second, or null.
export async function drawCapacity(node, {points, queueing, capacity, load}) {
  const Plotly = await loadPlotly();
  const loads = points.map(([x]) => x);
  const right = Math.max(...loads, capacity ?? 0, load ?? 0) * 1.05;
  const percent = (values) => values.map((value) => value * 100);
  const top = Math.max(120, Math.min(200, 100 * Math.max(...points.map(([, y]) => y)))) * 1.05;
  const about = "%{x:.4~g} weighted IOPS: %{y:.3~g} %<extra></extra>";
  const traces = [
    {name: "seen", x: loads, y: percent(points.map(([, y]) => y)), mode: "markers", marker: {color: colour("accent"), size: 7}, hovertemplate: about},
    {name: "fitted: more load is never faster", x: loads, y: percent(points.map(([, , fit]) => fit)), mode: "lines",
      line: {color: colour("accent"), width: 2}, hovertemplate: about}];
  if (queueing) {
    const [base, slope, limit] = queueing;
    const end = Math.min(right, limit * 0.99);
    const at = Array.from({length: CURVE_STEPS + 1}, (_, index) => end * index / CURVE_STEPS);
    traces.push({name: "fitted: a queue", x: at, y: percent(at.map((x) => base + slope * (x / limit) / (1 - x / limit))), mode: "lines",
      line: {color: colour("warn"), width: 1.5, dash: "dash"}, hovertemplate: about});
  }
  const upright = (name, x, tone, dash) => ({name, x: [x, x], y: [0, top], mode: "lines", hovertemplate: `${name}: %{x:.4~g}<extra></extra>`,
    line: {color: colour(tone), width: 2, dash}});
  if (capacity) traces.push(upright("what it can take", capacity, "bad", "solid"));
  if (load != null) traces.push(upright("load now", load, "ok", "dot"));
  await Plotly.react(node, traces, {...layout(), showlegend: true, hovermode: "closest",
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0}, margin: {l: 60, r: 8, t: 66, b: 42},
    shapes: [{type: "line", xref: "paper", x0: 0, x1: 1, y0: 100, y1: 100, line: {color: colour("soft"), width: 1, dash: "dot"}}],
    xaxis: {...axes(), range: [0, right], title: {text: "weighted IOPS", standoff: 4}, showgrid: false, fixedrange: true},
    yaxis: {...axes(), range: [0, top], ticksuffix: " %", nticks: 6, fixedrange: true},
  }, {displayModeBar: false, responsive: true});
}
