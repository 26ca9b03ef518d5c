// All gateways ever seen, and what they say now.

import {code} from "../cells.js";
import {element, setBadge} from "../dom.js";
import * as f from "../format.js";
import {startList} from "../list.js";

const STATES = {up: ["ok", "up"], recovered: ["ok", "up"], stalled: ["warn", "stalled"],
  detached: ["warn", "detached"], lost: ["bad", "lost"], refused: ["bad", "refused"]};
const now = (row) => ({...row, ...row.live});
const ago = (us) => f.duration(Date.now() / 1000 - us / 1e6);

const columns = [
  {label: "State", cls: "head", sort: "trouble", fill: (td, row) => {
    if (!td.firstChild) td.append(element("span"));
    const {state, reason} = now(row);
    setBadge(td.firstChild, ...(STATES[state] || ["", state]), reason || "");
  }},
  {label: "Gateway", cls: "wrap head", sort: "name", text: (row) => [row.name, row.address || ""]},
  {label: "Last statistics", cls: "num", sort: "oldest", falls: true, text: (row) => (now(row).last_cut_us ? `${ago(now(row).last_cut_us)} ago` : f.DASH)},
  {label: "Clock", cls: "num", title: "How far it is ahead of the server's (+) or behind (−)",
    text: (row) => (now(row).last_cut_us ? f.skew(now(row).clock_offset_us) : f.DASH)},
  {label: "I/O wait", cls: "num", sort: "waited", falls: true, title: "Share of the time in which tasks of its host waited for I/O", text: (row) => f.percent(now(row).io_waited_ratio)},
  {label: "Streams", cls: "num", title: "One client's use of one volume", text: (row) => f.count(row.live?.streams)},
  {label: "Lost statistics", cls: "num", sort: "lost", falls: true, title: "Cuts that its agent had to drop", text: (row) => (now(row).dropped_cuts ? f.count(now(row).dropped_cuts) : f.DASH)},
];

export const start = () => { startList({path: "/gateways", id: "gateways", columns, keyOf: (row) => row.gateway_id,
  fields: {match: "", state: "", sort: "trouble", offset: "0"}, refreshMs: 3000,
  empty: () => ["No gateway has connected. Start one: ", code("gateway-agent run --config FILE")]}); };
