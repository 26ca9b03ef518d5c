// All backends: what each carries now, and what control does there.

import {backendAddress, code, fillLink} from "../cells.js";
import {element, setBadge, setText} from "../dom.js";
import * as f from "../format.js";
import {startList} from "../list.js";

const live = (row) => row.live || {};
const columns = [
  {label: "Backend", cls: "wrap head", sort: "name", fill: (td, row) => fillLink(td, backendAddress(row.backend), row.backend)},
  {label: "Control", cls: "head", sort: "trouble", fill: (td, row) => {
    if (!td.firstChild) td.append(element("span"));
    const {fault, phase} = live(row);
    setBadge(td.firstChild, fault ? "bad" : phase && phase !== "idle" ? "warn" : "", fault ? `storage ${fault}` : f.PHASES[phase] || "not seen now");
  }},
  {label: "Load now", cls: "num", sort: "busiest", falls: true, title: f.WEIGHTED, text: (row) => f.weighted(live(row).cost_per_s)},
  {label: "Of what it can take", cls: "num", sort: "fullest", falls: true, title: "Of the least load at which a promise on it is still kept, by the newest policy",
    text: (row) => {
      const [load, most] = [live(row).cost_per_s, row.capacity_cost_per_s];
      return most ? [load == null ? f.DASH : f.percent(load / most, 0), f.weighted(most)] : "not known yet";
    }},
  {label: "Held to", cls: "num", sort: "held", title: "All volumes together that are slowed down",
    text: (row) => (live(row).cap_cost_per_s ? f.weighted(live(row).cap_cost_per_s) : "no cap")},
  {label: "Helps", cls: "wrap", text: (row) => (live(row).victims || []).join(", ") || f.DASH},
  {label: "", cls: "full", fill: (td, row) => {
    if (!td.firstChild) td.append(element("a"));
    setText(td.firstChild, "Volumes");
    td.firstChild.href = `/volumes?backend=${encodeURIComponent(row.backend)}`;
  }},
];

export const start = () => { startList({path: "/backends", id: "backends", columns, keyOf: (row) => row.backend,
  fields: {match: "", sort: "trouble", offset: "0"},
  empty: () => ["No backend seen yet: gateways say which storage their volumes share. Start one: ", code("gateway-agent run --config FILE")]}); };
