// Nodes of the cluster and the servers around them: which one acts, since when, and which stand by.

import {read} from "../api.js";
import {code} from "../cells.js";
import {element, fillTable, setBadge, setText} from "../dom.js";
import * as f from "../format.js";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 3000;
const STATES = {acts: ["ok", "acts"], "stands-by": ["", "stands by"], runs: ["", "runs"], away: ["bad", "away"],
  unknown: ["warn", "not known"]};
const RUNS = "There is no server around this node, or one that takes over from no other";
const WITH_SERVER = ["acts", "stands-by"];

const columns = [
  {label: "State", cls: "head", fill: (td, row) => {
    if (!td.firstChild) td.append(element("span"));
    const why = row.why ? `It gave the lease up, as it ${row.why}` : "";
    setBadge(td.firstChild, ...(STATES[row.state] || ["", row.state]), row.state === "runs" ? RUNS : why);
  }},
  {label: "Node", cls: "head", text: (row) => [row.name, row.is_this ? "this page" : row.site || ""]},
  {label: "Since", text: (row) => (row.since_us ? f.clock(row.since_us) : f.DASH)},
  {label: "Gateways", cls: "num", text: (row) => (row.state === "acts" ? f.count(row.gateways) : f.DASH)},
  {label: "Sign of life", cls: "num", title: "When this server last heard of it, and after how long without a sign another one takes over",
    text: (row) => (row.lease_s ? [row.heard_s === null ? f.DASH : `heard of ${f.duration(row.heard_s)} ago`,
      `another acts after ${f.duration(row.lease_s)}`] : f.DASH)},
  {label: "Release", text: (row) => row.release || f.DASH},
  {label: "NATS", title: "Version of nats-server, which carries messages between the nodes", text: (row) => row.version || f.DASH},
  {label: "Page", cls: "wrap full", fill: (td, row) => {
    const shown = row.is_this ? "" : row.page || "";
    if (td.dataset.shown === shown) return;
    td.dataset.shown = shown;
    td.replaceChildren(shown ? element("a", {href: `${shown}/servers`}, shown) : row.is_this ? "this one" : f.DASH);
  }},
];

// What holds now, in a sentence; it is what somebody at night wants to know first.
function sentenceOf(rows) {
  if (!rows.length) return "";
  const acting = rows.find((row) => row.state === "acts");
  const others = rows.filter((row) => row.state === "stands-by").map((row) => row.name);
  const away = rows.filter((row) => row.state === "away").map((row) => row.name);
  if (rows.every((row) => row.state === "unknown")) return "This server's own node does not answer: which nodes run is not known.";
  if (!acting && !rows.some((row) => WITH_SERVER.includes(row.state))) return "No server of these nodes takes over from another one.";
  return [acting ? `The server of ${acting.name} acts since ${f.clock(acting.since_us)}.` : "No server is known to act.",
    others.length ? `${others.join(", ")} ${others.length > 1 ? "stand" : "stands"} by.` : "None stands by: its death would be an outage.",
    away.length ? `${away.join(", ")} ${away.length > 1 ? "do" : "does"} not answer.` : ""].filter(Boolean).join(" ");
}

async function refresh() {
  const rows = (await read("/nodes"))?.items;
  if (!rows) return; // the banner says that the server is away
  setText($("acting"), sentenceOf(rows));
  fillTable($("servers"), columns, rows, (row) => row.name,
    () => ["This server is alone: no other one takes over when it dies. How two or more do: ",
      code("docs/operations/cluster.md")]);
}

export async function start() {
  await refresh();
  setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_MS);
}
export const onBack = refresh;
