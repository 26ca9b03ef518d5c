// Who changed what, newest first.

import * as f from "../format.js";
import {startList} from "../list.js";

const words = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));
const columns = [
  {label: "When", cls: "head", text: (row) => f.clock(row.at_us)},
  {label: "Who", cls: "wrap head", text: (row) => row.who || f.DASH},
  {label: "What", cls: "wrap", text: (row) => row.action},
  {label: "Of", cls: "wrap", text: (row) => row.subject || f.DASH},
  {label: "Before", cls: "wrap small", text: (row) => words(row.before) || f.DASH},
  {label: "After", cls: "wrap small", text: (row) => words(row.after) || f.DASH},
];

export const start = () => { startList({path: "/audit", id: "audit", columns, keyOf: (row) => row.audit_id, fields: {before: ""},
  refreshMs: 15000, empty: () => ["Nothing was changed yet."]}); };
