// Events with filters and acknowledgement; who is notified of them; silences. Read again every 5 s.

import {follow, startAddress} from "../address.js";
import {call, read} from "../api.js";
import {ask} from "../ask.js";
import {changeAddress, endDocument, startDocuments} from "../documents.js";
import {element, fillList, fillTable, setBadge, setText} from "../dom.js";
import {startForm} from "../form.js";
import * as f from "../format.js";
import {showWords} from "../words.js";

const $ = (id) => document.getElementById(id);
const PAGE = 25;
const MOST_COUNTED = 100;
const HOURS = {"1h": 1, "4h": 4, "1d": 24};
const REFRESH_MS = 5000;
const STATES = {ok: ["ok", "✓ ok"], failing: ["bad", "✗ failing"], hanging: ["bad", "✗ hanging"], held: ["warn", "held back"]};
const SILENCE_STATES = {running: ["warn", "running"], planned: ["", "planned"], unreadable: ["bad", "unreadable"]};
const FIELDS = {severity: "warning,critical", subject: "", kind: "", open: "1", before: ""};
let page = null; // the shell
let address = null;
let turn = 0; // answers of an older question are dropped
let refreshRoutes = null;

const wanted = () => {
  const query = new URLSearchParams({limit: PAGE});
  for (const [name, value] of Object.entries(address.get())) {
    if (value && value !== "all" && value !== "0") query.set(name, value);
  }
  return query;
};

function deliveryWords(row) {
  if (!row.undelivered?.length) return "";
  return row.undelivered.map((one) => one.state === "held" ? `held back from ${one.recipient}` : `not confirmed by ${one.recipient}${one.attempt ? `, ${f.plural(one.attempt, "try", "tries")}` : ""}`
    + `${one.reason ? `: ${one.reason}` : ""}`).join("; ");
}

function showEvents(rows, nothing) {
  fillList($("inbox-list"), rows, (row) => row.event_id,
    (row) => element("li", {"data-event": row.event_id}, element("time", {class: "soft"}), element("span"), element("p"),
      element("p", {class: "soft"}), element("p", {class: "undelivered"}),
      element("button", {type: "button", onclick: () => openNote(row)}, "Acknowledge…"), " ",
      element("a", {class: "runbook", href: `${$("inbox-list").dataset.runbook}#${encodeURIComponent(row.kind)}`}, "What to do")),
    (li, row) => {
      setText(li.querySelector("time"), f.clock(row.at_us));
      setBadge(li.querySelector("span"), f.SEVERITIES[row.severity] || "", row.severity);
      const [what, about, undelivered] = li.querySelectorAll("p");
      setText(what, f.plain(row.text || row.kind));
      const said = row.acknowledged.map((one) => `✓ ${one.who}, ${f.clock(one.at_us)}: ${one.note}`).join(" · ");
      const ended = row.ended_us ? `ended ${f.clock(row.ended_us)}` : "";
      showWords(about, [f.aboutEvent(row), ended, said].filter(Boolean).join(" · "), row.kind);
      setText(undelivered, deliveryWords(row));
      li.querySelector("button").hidden = !page.signedIn() || row.acknowledged.length > 0;
    },
    () => [nothing]);
}

function showPager(next) {
  const links = [];
  if (address.get().before) links.push(follow(address, element("a", {rel: "prev"}, "Newest"), {before: ""}));
  if (next) links.push(follow(address, element("a", {rel: "next"}, "Older"), {before: next}));
  const shown = links.map((node) => node.getAttribute("href")).join("|");
  if ($("inbox-pager").dataset.shown === shown) return;
  $("inbox-pager").dataset.shown = shown;
  $("inbox-pager").replaceChildren(...links);
}

function showRecipients(rows) {
  const columns = [
    {label: "State", cls: "head", fill: (td, row) => {
      if (!td.firstChild) td.append(element("span"));
      setBadge(td.firstChild, ...(STATES[row.delivery?.state] || ["", "unknown"]));
    }},
    {label: "Recipient", cls: "wrap head", text: (row) => [row.name, row.recipient_kind]},
    {label: "Waiting", cls: "num",
      text: (row) => (row.delivery?.waiting_is_at_most ? "≤ " : "") + f.count(row.delivery?.waiting)},
    {label: "Given up", cls: "num", text: (row) => f.count(row.delivery?.dead_letters)},
    {label: "Last answer", cls: "wrap", text: (row) => row.delivery?.last_answer || f.DASH},
    {label: "", cls: "full", fill: (td, row) => {
      if (!page.signedIn()) td.replaceChildren();
      else if (!td.firstChild) {
        td.append(element("button", {type: "button", onclick: () => tryRecipient(row)}, "Test…"),
          element("button", {type: "button", "aria-label": `End ${row.name}`, onclick: () => endDocument(page, "Recipient", row.name, refresh)}, "End…"),
          " ", element("a", {href: changeAddress("Recipient", row.name), "aria-label": `Change ${row.name}`}, "Change"));
      }
    }},
  ];
  fillTable($("recipients"), columns, rows, (row) => row.name, () =>
    ["No person is notified of events. Apply a recipient and a route: ", element("code", {}, "sla apply -f recipients.yaml")]);
}

function showSilences(rows) {
  fillList($("silences"), rows, (row) => row.name,
    (row) => element("li", {"data-silence": row.name}, element("div", {}, element("span"), " ", element("strong"), " ",
      element("span", {class: "soft"})), element("p"), element("button", {type: "button", onclick: () => endSilence(row.name)}, "End…")),
    (li, row) => {
      const [badge, when] = li.querySelectorAll("span");
      setBadge(badge, ...(SILENCE_STATES[row.state] || ["", row.state]));
      setText(li.querySelector("strong"), row.name);
      setText(when, `${f.clock(row.from_us)} to ${f.clock(row.to_us)}${row.repeats ? ", repeats" : ""}`);
      const whom = row.recipients?.length ? ` from ${row.recipients.join(", ")}` : "";
      setText(li.querySelector("p"), `holds back ${row.match || "?"}${whom}: ${row.reason || ""} (${row.author || row.applied_by})`);
      li.querySelector("button").hidden = !page.signedIn();
    },
    () => ["Nothing is held back."]);
}

// What the filter asks for; words in place of it where the server refuses the filter; null while it is away.
const readEvents = (query) => call("GET", `/inbox?${query}`).then((answer) => answer.body,
  (error) => (error.status >= 400 && error.status < 500 ? {items: [], next: null, refusal: error.message} : null));

async function refresh() {
  const number = ++turn;
  const query = wanted();
  const [events, recipients, silences] = await Promise.all([readEvents(query), read("/recipients"), read("/silences")]);
  if (number !== turn) return;
  if (events) {
    showEvents(events.items, events.refusal || (query.has("open") ? "Nothing is waiting to be acknowledged." : "No event is like that."));
    showPager(events.next);
  }
  if (recipients) showRecipients(recipients.items);
  if (silences) showSilences(silences.items);
  await refreshRoutes();
}

const tryRecipient = ({name, recipient_kind: kind}) => ask(page, {
  title: `Test ${name}?`,
  button: "Send a test",
  words: `A test event goes to ${name}${kind ? ` (${kind})` : ""} now, and to no other recipient: whoever reads it there is notified.`,
  send: () => call("POST", `/recipients/${encodeURIComponent(name)}/test`, {}),
  done: (answer) => ended(answer, `A test event for ${name} was raised.`)});

const endSilence = (name) => ask(page, {
  title: `End ${name}?`,
  button: "End the silence",
  words: "What it held back is sent now, in its order, and so is what follows. To hold it back again takes a new silence.",
  send: () => call("DELETE", `/silences/${encodeURIComponent(name)}`),
  done: (answer) => ended(answer, `${name} has ended.`)});

function ended(answer, words) {
  if (answer.status === 200) page.notice(words);
  refresh();
}

function openNote(row) {
  const form = $("note-form");
  form.reset();
  form.dataset.event = row.event_id;
  setText($("note-text"), row.text || row.kind);
  form.querySelector(".problem").hidden = true;
  $("note-dialog").showModal();
}

// A form of a dialog: sends, closes, or says why not.
function onSubmit(form, dialog, send) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await send(Object.fromEntries(new FormData(form)));
      dialog.close();
    } catch (error) {
      form.querySelector(".problem").hidden = false;
      setText(form.querySelector(".problem"), error.message);
    }
    refresh();
  });
  form.querySelector("[value=cancel]").addEventListener("click", () => dialog.close());
}

// A Silence document from now on; JSON is YAML.
function silence({duration, reason, severity, kind, agreement}) {
  const match = {};
  if (severity) match.severities = severity.split(",");
  if (kind) match.kinds = [kind];
  if (agreement) match.agreements = [agreement];
  const start = new Date(Date.now() - 1000).toISOString().slice(0, 19);
  const name = `silence-${start.replace(/[^0-9]/g, "")}-${Math.random().toString(16).slice(2, 6)}`;
  const spec = {match, start, duration, tz: "UTC", reason};
  return {apiVersion: "storage-sla/v1", kind: "Silence", metadata: {name}, spec};
}

// What it would hold back, by what goes on now; whether the server would take it.
async function silenceWords(given) {
  const wanted = new URLSearchParams({open: "1", limit: MOST_COUNTED, ...(given.severity ? {severity: given.severity} : {}), ...(given.kind ? {kind: given.kind} : {})});
  const [now] = await Promise.all([read(`/inbox?${wanted}`), call("POST", "/slas?dry_run=1", silence(given))]);
  const rows = (now?.items || []).filter((row) => !given.agreement || (row.subject || "").split("/")[0] === given.agreement);
  const like = rows.length === MOST_COUNTED ? `${MOST_COUNTED} or more` : String(rows.length);
  const until = Date.now() + HOURS[given.duration] * 3600e3;
  return `Until ${f.clock(until * 1000)} no person is notified of such events; they stay in the list. Now ${like} of them ${rows.length === 1 ? "waits" : "wait"}.`;
}

export function start(shell) {
  page = shell;
  refreshRoutes = startDocuments(shell, $("routes"), "Route", "No event goes to anybody: a route names which events go to which recipients.");
  address = startAddress(FIELDS, $("inbox-filter"), refresh);
  onSubmit($("note-form"), $("note-dialog"), ({note}) =>
    call("POST", `/events/${encodeURIComponent($("note-form").dataset.event)}/acknowledge`, {note}));
  $("silence-open").addEventListener("click", startForm(shell, $("silence-dialog"), {
    consequence: silenceWords, send: (given) => call("POST", "/slas", silence(given)), done: refresh}));
  setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_MS);
  address.show();
}

export function onSession() {
  for (const part of document.querySelectorAll("[data-changes], #silence-open")) part.hidden = !page.signedIn();
  refresh();
}
