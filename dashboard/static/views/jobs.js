// Runs of jobs, newest first.

import {code} from "../cells.js";
import {element, setBadge} from "../dom.js";
import * as f from "../format.js";
import {startList} from "../list.js";

const BADGES = {done: "ok", running: "", failed: "bad", killed: "bad"};
const columns = [
  {label: "State", cls: "head", sort: "state", fill: (td, row) => {
    if (!td.firstChild) td.append(element("span"));
    setBadge(td.firstChild, BADGES[row.state] ?? "warn", row.state);
  }},
  {label: "Job", cls: "head", sort: "kind", text: (row) => [row.kind, row.who ? `by ${row.who}` : ""]},
  {label: "Began", sort: "newest", falls: true, text: (row) => f.clock(row.started_us)},
  {label: "Took", cls: "num", sort: "longest", falls: true, text: (row) => (row.ended_us ? f.duration((row.ended_us - row.started_us) / 1e6) : "goes on")},
  {label: "Rows read", cls: "num", sort: "rows", falls: true, text: (row) => f.count(row.rows)},
  {label: "Policy", cls: "num", fill: (td, row) => {
    if (td.firstChild || !row.version) return;
    td.append(element("a", {href: `/policies/${row.version}`}, `version ${row.version}`));
  }},
  {label: "What came of it", cls: "wrap full", text: (row) => f.plain(row.text) || f.DASH},
];

export const start = () => { startList({path: "/jobs", id: "jobs", columns, keyOf: (row) => row.job_id, fields: {match: "", state: "", sort: "newest", before: ""},
  empty: () => ["No job has run yet. Compute a policy from what was stored: ", code("sla policy run")]}); };
