// Pieces of the views of one thing: figures on top, decisions, neighbours.

import {volumeAddress} from "./cells.js";
import {element, fillList, fillTable, setText} from "./dom.js";
import * as f from "./format.js";

// figures: [[label, main, small]]; drawn again only when one changed.
export function showFigures(node, figures) {
  const shown = JSON.stringify(figures);
  if (node.dataset.shown === shown) return;
  node.dataset.shown = shown;
  node.replaceChildren(...figures.map(([label, main, small, cls]) => element("div", {}, element("dt", {}, label),
    element("dd", {class: cls || null}, main, ...(small ? [element("small", {}, small)] : [])))));
}

const MOST_CAPS = 5; // of one step; all of them are in the views of their volumes

// Rows with the caps that each step set, which have its time and its text: one thing that was done is one row.
function joined(rows) {
  const keyOf = (row) => JSON.stringify([row.at_us, row.backend, row.text]);
  const isCap = (row) => row.kind.startsWith("cap-") || row.kind === "observed";
  const caps = new Map(rows.filter((row) => !isCap(row)).map((row) => [keyOf(row), []]));
  for (const row of rows) if (isCap(row)) caps.get(keyOf(row))?.push(row);
  return rows.filter((row) => !isCap(row) || !caps.has(keyOf(row))).map((row) => ({...row, caps: isCap(row) ? [] : caps.get(keyOf(row))}));
}

function stepWords(row) {
  const left = row.caps.length - MOST_CAPS;
  return [f.decisionWords(row), ...row.caps.slice(0, MOST_CAPS).map(f.decisionWords), ...(left > 0 ? [`${f.plural(left, "more cap")}`] : [])].join("; ");
}

export function showDecisions(node, rows, empty) {
  fillList(node, joined(rows), (row) => row.decision_id,
    () => element("li", {}, element("time", {class: "soft"}), element("p"), element("p", {class: "soft"})),
    (li, row) => {
      setText(li.querySelector("time"), f.clock(row.at_us));
      const [what, how] = li.querySelectorAll("p");
      setText(what, stepWords(row));
      const whom = row.victim ? `to keep ${row.victim}` : "";
      setText(how, [whom, f.plain(row.text), row.mode === "observe" ? "observed only" : ""].filter(Boolean).join(" · "));
    },
    () => [empty]);
}

// Versions of a document, each with what differs from the one before it.
export function showVersions(node, rows) {
  const said = (value) => (value === null || value === undefined ? "nothing" : typeof value === "string" ? value : JSON.stringify(value));
  fillList(node, rows, (row) => row.version,
    (row) => element("li", {}, element("div", {}, element("strong", {}, `Version ${row.version}`), " ", element("span", {class: "soft"})),
      element("dl", {class: "changes"}, ...row.changes.flatMap((one) => [element("dt", {}, one.field),
        element("dd", {}, element("del", {}, said(one.before)), " → ", element("ins", {}, said(one.after)))]))),
    (li, row) => setText(li.querySelector("span"), `${f.moment(row.applied_us)} by ${row.applied_by || "?"}${row.ended_us ? `, until ${f.moment(row.ended_us)}` : ""}`),
    () => ["There is one version."]);
}

// Rows of /volumes: who uses how much of what they share; one may be the view's own.
export function showVolumes(table, rows, own = "") {
  const live = (row) => row.live || {};
  fillTable(table, [
    {label: "Volume", cls: "wrap head", fill: (td, row) => {
      if (td.firstChild) return;
      td.append(row.volume === own ? element("strong", {}, row.volume) : element("a", {href: volumeAddress(row.volume)}, row.volume));
    }},
    {label: "IOPS", cls: "num", text: (row) => f.count(live(row).iops)},
    {label: "Throughput", cls: "num", text: (row) => f.bytesRate(live(row).bytes_per_s)},
    {label: "p95", cls: "num", text: (row) => f.latency(live(row).p95_us)},
    {label: "Queue", cls: "num", text: (row) => [f.count(live(row).inflight), live(row).held ? `${f.count(live(row).held)} held` : ""]},
    {label: "Cap", cls: "num wrap", text: (row) => f.volumeCap(live(row)) || "none"},
  ], rows, (row) => row.volume, () => ["No volume is known here."]);
}

// A thing that is not there: said in place of all about it.
export function showMissing(error) {
  document.getElementById("found").hidden = true;
  document.getElementById("missing").hidden = false;
  setText(document.getElementById("missing"), error.message);
}
