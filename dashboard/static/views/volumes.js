// All volumes: found by name, of one backend, the busiest first; sorted and paged by the server.

import {backendLink, code, seesAll, volumeAddress, whyLink} from "../cells.js";
import {startDocuments} from "../documents.js";
import {element, setPair, setText} from "../dom.js";
import * as f from "../format.js";
import {startList} from "../list.js";
import {openThrottle, release, startThrottle} from "../throttle.js";

let shell = null;
let list = null;
let refreshLabels = null;
const live = (row) => row.live || {};

const columns = [
  {label: "Volume", cls: "wrap head full", sort: "name", fill: (td, row) => {
    if (!td.firstChild) td.append(element("a", {class: "name", href: volumeAddress(row.volume)}, row.volume), " ",
      whyLink("volume", row.volume), element("small"));
    const small = td.lastChild;
    const backend = live(row).backend || row.backend;
    const labels = Object.entries(row.labels || {}).map((pair) => pair.join("=")).sort().join(", ");
    const shown = `${backend} ${labels}`;
    if (small.dataset.shown === shown) return;
    small.dataset.shown = shown;
    small.replaceChildren(...(backend ? ["on ", backendLink(backend)] : []), ...(labels ? [`, ${labels}`] : []));
  }},
  {label: "IOPS", cls: "num", sort: "busiest", falls: true,
    text: (row) => [f.count(live(row).iops), row.live ? `${f.count(live(row).read_iops)} read, ${f.count(live(row).write_iops)} written` : ""]},
  {label: "Throughput", cls: "num", sort: "throughput", falls: true, text: (row) => f.bytesRate(live(row).bytes_per_s)},
  {label: "p50", cls: "num", title: "Half of the I/Os are faster", text: (row) => f.latency(live(row).p50_us)},
  {label: "p95", cls: "num", sort: "slowest", falls: true, title: "95 of 100 I/Os are faster", text: (row) => f.latency(live(row).p95_us)},
  {label: "p99", cls: "num", title: "99 of 100 I/Os are faster", text: (row) => f.latency(live(row).p99_us)},
  {label: "Queue", cls: "num", sort: "queue", falls: true, title: "At the storage, and held back by our throttle",
    text: (row) => [f.count(live(row).inflight), live(row).held ? `${f.count(live(row).held)} held` : ""]},
  {label: "Cap", cls: "num", title: f.WEIGHTED, text: (row) => !row.live ? f.DASH
    : f.volumeCap(live(row)) ? [f.volumeCap(live(row)), `delays ${f.latency(live(row).delay_us)}`] : "none"},
  {label: "I/Os in total", cls: "num", fill: (td, row) => {
    td.toggleAttribute("data-total", true);
    setPair(td, [f.count(row.reads + row.writes), row.errors ? `${f.count(row.errors)} errors` : ""]);
  }},
  {label: "", cls: "full", fill: (td, row) => {
    if (!shell.signedIn()) return td.replaceChildren();
    if (!td.firstChild) {
      td.append(element("button", {type: "button", onclick: () => openThrottle(row.volume)}, "Throttle…"),
        element("button", {type: "button", onclick: () => release(shell, row.volume, () => list?.refresh())}, "Release…"));
    }
    return td.lastChild.hidden = !row.throttled_by_hand;
  }},
];

export function start(around) {
  shell = around;
  startThrottle(shell);
  if (seesAll) refreshLabels = startDocuments(shell, document.getElementById("labels"), "VolumeLabels", "There is none: volumes have the labels that their agents give them.");
  list = startList({path: "/volumes", id: "volumes", columns, keyOf: (row) => row.volume,
    fields: {match: "", backend: "", labels: "", sort: "busiest", offset: "0"}, refreshMs: 3000,
    onAnswer: ({count}, address) => {
      const {backend} = address.get();
      setText(document.getElementById("tally"), `${f.plural(count, "volume")}${backend ? ` on ${backend}` : ""}`);
    },
    empty: () => ["No volume seen yet. Start a gateway agent beside the storage: ", code("gateway-agent run --config FILE")]});
}

export function onSession() {
  if (seesAll) document.getElementById("labels-add").hidden = !shell.signedIn();
  list?.refresh();
  refreshLabels?.();
}
