// Policy versions, newest first.

import {code} from "../cells.js";
import {element, setBadge} from "../dom.js";
import * as f from "../format.js";
import {showHarms} from "../harms.js";
import {startList} from "../list.js";

// The newest version of all, not of what is filtered.
const isPlain = (address) => Object.values(address.get()).every((value) => value === "" || value === "newest");

const columns = [
  {label: "State", cls: "head", sort: "state", fill: (td, row) => {
    if (!td.firstChild) td.append(element("span"));
    setBadge(td.firstChild, ...f.policyState(row.state));
  }},
  {label: "Version", cls: "head", fill: (td, row) => {
    if (!td.firstChild) td.append(element("a", {class: "name", href: `/policies/${row.version}`}, `Version ${row.version}`));
  }},
  {label: "Computed", sort: "newest", falls: true, text: (row) => [f.clock(row.created_us), row.published_by ? `by ${row.published_by}` : ""]},
  {label: "From", cls: "num", text: (row) => (row.job?.rollups ? `${f.count(row.job.rollups)} rows of statistics` : f.DASH)},
  {label: "Would it have helped?", cls: "wrap full", text: (row) => f.backTest(row.report?.back_test)},
];

export const start = () => { startList({path: "/policies", id: "policies", columns, keyOf: (row) => row.version, fields: {match: "", state: "", sort: "newest", before: ""},
  refreshMs: 15000, onAnswer: ({items}, address) => { if (isPlain(address)) showHarms(items[0]?.version); }, empty: () => ["No policy was computed yet. Compute one from what was stored: ", code("sla policy run")]}); };
