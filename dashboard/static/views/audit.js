// Who changed what, newest first.

import * as f from "../format.js";
import {startList} from "../list.js";
import {action, showWords} from "../words.js";

const words = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value, (_key, inner) => inner ?? undefined));
const columns = [
  {label: "When", cls: "head", sort: "newest", falls: true, text: (row) => f.clock(row.at_us)},
  {label: "Who", cls: "wrap", sort: "who", text: (row) => row.who || f.DASH},
  {label: "What", cls: "wrap", sort: "action", fill: (td, row) => showWords(td, action(row.action), row.action)},
  {label: "Of", cls: "wrap", sort: "subject", text: (row) => row.subject || f.DASH},
  {label: "Before", cls: "wrap small", text: (row) => words(row.before) || f.DASH},
  {label: "After", cls: "wrap small", text: (row) => words(row.after) || f.DASH},
];

export const start = () => { startList({path: "/audit", id: "audit", columns, keyOf: (row) => row.audit_id, fields: {match: "", action: "", sort: "newest", before: ""},
  refreshMs: 15000, empty: () => ["Nothing was changed yet."]}); };
