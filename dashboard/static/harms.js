// Who hurt whom by one policy version's attribution: a table, and the graph that the server draws of it.

import {read} from "./api.js";
import {agreementAddress, volumeAddress} from "./cells.js";
import {element, fillTable, setBadge, setText} from "./dom.js";
import * as f from "./format.js";

const $ = (id) => document.getElementById(id);
const OTHERS = "(others)";
const keyOf = (row) => `${row.backend}/${row.sla}/${row.objective}/${row.step}/${row.volume}`;
let shown = null;

const columns = [
  {label: "Who", cls: "wrap head", fill: (td, row) => {
    if (!td.firstChild) td.append(row.volume === OTHERS ? "small volumes together" : element("a", {class: "name", href: volumeAddress(row.volume)}, row.volume));
  }},
  {label: "Hurt", cls: "wrap", fill: (td, row) => {
    if (!td.firstChild) td.append(element("a", {href: agreementAddress(row.sla, row.objective)}, `${row.sla}/${row.objective}`), ` on ${row.backend}${row.step ? `, step ${row.step + 1}` : ""}`);
  }},
  {label: "How much", cls: "num", title: "Its share of the misses in bad intervals; what would have been without it",
    text: (row) => [`${f.share(row.share)} of the harm`, `without it ${f.count(row.avoided_bad)} of ${f.count(row.bad)} bad intervals would be good`]},
  {label: "When", text: (row) => [`worst at ${f.moment(row.worst_us)}`, `from ${f.moment(row.first_us)} to ${f.moment(row.last_us)}`]},
  {label: "How sure", cls: "wrap full", fill: (td, row) => {
    if (!td.firstChild) td.append(element("span"), element("small"));
    setBadge(td.firstChild, ...(row.likely_cause ? ["warn", "likely cause"] : ["", "correlation"]));
    setText(td.lastChild, row.reason ? ` ${f.sentence(row.reason)}` : "");
  }},
];

export async function showHarms(version) {
  if (!version || version === shown) return;
  const rows = (await read(`/policies/${version}/harms?limit=1000`))?.items;
  if (!rows) return;
  shown = version;
  $("harms-part").hidden = false;
  setText($("harms-about"), `Of version ${version}: whose use went with the intervals in which promises were broken. `
    + "A correlation is no proof: the data cannot tell it from chance, or from other volumes that do the same at the same time.");
  fillTable($("harms"), columns, rows, keyOf, () => ["No promise was broken beside a neighbour."]);
  const graph = $("harms-graph");
  graph.hidden = rows.length === 0;
  if (rows.length) graph.src = `/policies/${version}/harms.svg`;
}
