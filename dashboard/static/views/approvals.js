// Changes that wait for a second person: seen, approved or refused. The digest says which change was seen.

import {call} from "../api.js";
import {code} from "../cells.js";
import {element, setText} from "../dom.js";
import * as f from "../format.js";
import {startList} from "../list.js";

const $ = (id) => document.getElementById(id);
let page = null; // the shell
let list = null;
let seen = null; // the change that the dialog is about
let sent = null; // the one whose decision is on its way

const columns = [
  {label: "Change", cls: "wrap head", text: (row) => row.text},
  {label: "Asked for by", cls: "wrap", text: (row) => row.requested_by},
  {label: "Since", text: (row) => f.clock(row.requested_us)},
  {label: "Waits until", text: (row) => f.clock(row.expires_us)},
  {label: "", cls: "full", fill: (td, row) => {
    if (!page.signedIn()) td.replaceChildren();
    else if (!td.firstChild) td.append(element("button", {type: "button", onclick: () => open(row)}, "Decide…"));
  }},
];

function open(row) {
  seen = row;
  $("approve-form").reset();
  $("approve-form").querySelector(".problem").hidden = true;
  setText($("approve-text"), `${row.requested_by} asks for: ${row.text}. Approving carries out exactly this, at once.`);
  $("approve-dialog").showModal();
}

// By its own button alone: Enter in the note decides nothing.
async function decide(event) {
  const verb = event.target.value;
  if (sent === seen || !["approve", "refuse"].includes(verb)) return;
  const row = sent = seen;
  const body = {digest: row.digest, note: new FormData($("approve-form")).get("note")};
  try {
    await call("POST", `/approvals/${row.approval_id}/${verb}`, body);
    if (seen === row) $("approve-dialog").close();
    page.notice(verb === "approve" ? `Approved: ${row.text}.` : `Refused: ${row.text}.`);
  } catch (error) {
    if (seen !== row) page.notice(error.message);
    $("approve-form").querySelector(".problem").hidden = seen !== row;
    setText($("approve-form").querySelector(".problem"), error.message);
  } finally {
    if (sent === row) sent = null;
  }
  list.refresh();
}

export function start(shell) {
  page = shell;
  $("approve-form").addEventListener("submit", (event) => event.preventDefault());
  $("approve-form").addEventListener("click", decide);
  $("approve-cancel").addEventListener("click", () => $("approve-dialog").close());
  list = startList({path: "/approvals", id: "approvals", columns, keyOf: (row) => row.approval_id, fields: {},
    empty: () => ["No change waits for a second person. Which kinds of change do is set in the server's file: ", code("[api] approval")]});
}

export const onSession = () => list.refresh();
