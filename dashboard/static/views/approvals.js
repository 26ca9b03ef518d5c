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

const columns = [
  {label: "Change", cls: "wrap head", text: (row) => row.text},
  {label: "Asked for by", cls: "wrap head", text: (row) => row.requested_by},
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

async function decide(event) {
  event.preventDefault();
  const body = {digest: seen.digest, note: new FormData($("approve-form")).get("note")};
  const verb = event.submitter?.value === "refuse" ? "refuse" : "approve";
  try {
    await call("POST", `/approvals/${seen.approval_id}/${verb}`, body);
    $("approve-dialog").close();
    page.notice(verb === "approve" ? `Approved: ${seen.text}.` : `Refused: ${seen.text}.`);
  } catch (error) {
    $("approve-form").querySelector(".problem").hidden = false;
    setText($("approve-form").querySelector(".problem"), error.message);
  }
  list.refresh();
}

export function start(shell) {
  page = shell;
  $("approve-form").addEventListener("submit", decide);
  $("approve-cancel").addEventListener("click", () => $("approve-dialog").close());
  list = startList({path: "/approvals", id: "approvals", columns, keyOf: (row) => row.approval_id, fields: {},
    empty: () => ["No change waits. Which ones do: ", code("[api] approval")]});
}

export const onSession = () => list.refresh();
