// The form of a document: fields write it, the server checks it as it is written, and says of an agreement whether it could
// be kept beside those in force. It is applied after a question that says what changes.

import {call, read} from "../api.js";
import {compose, isKind} from "../compose.js";
import {changeWords, inForce, noun, shownAt, versions} from "../documents.js";
import {element, setBadge, setText} from "../dom.js";
import {startForm} from "../form.js";
import * as f from "../format.js";
import {showVersions} from "../parts.js";
import {wallTime} from "../zone.js";

const $ = (id) => document.getElementById(id);
const PAUSE_MS = 400;
const HOUR_MS = 3600e3;
const ADMITTED = {yes: ["ok", "can be kept"], no: ["bad", "cannot be kept"], unknown: ["warn", "not known"]};
const page = {shell: null, kind: "SLA", turn: 0, timer: 0, checked: null, admitted: null, base: null, conflict: 0};

// What was loaded to be edited is named with its version: a change by others in between is refused, not overwritten. A text
// about other documents may name it, too.
function address(query = {}) {
  const {base} = page;
  const name = base && (base.kind === "SLA" ? base.name : `${base.kind}/${base.name}`);
  return `/slas?${new URLSearchParams({...query, ...(base ? {based_on: `${name}:${base.version}`} : {})})}`;
}

function showProblems(rows) {
  $("problems").replaceChildren(...rows.map((row) => element("li", {},
    element("p", {}, [row.line ? `Line ${row.line}` : "", row.field, row.problem].filter(Boolean).join(": ")),
    ...(row.fix ? [element("p", {class: "soft"}, row.fix)] : []))));
}

// What would come of it, a sentence a document.
const allWords = ({applied, warnings}) => [...applied.map(changeWords), ...(warnings || []).map(f.sentence)].join(" ");

function admissionWords(row) {
  const whole = row.promised + row.unpromised_floors + row.added;
  const room = row.capacity === null ? "what it can take is not known" : `it can take ${f.weighted(row.capacity)} for ${row.capacity_of}`;
  return `${row.backend}: ${f.weighted(whole)} would be promised, ${f.weighted(row.added)} of it by this; ${room}.`;
}

function showAdmission(answer, words) {
  setBadge($("admit"), ...(answer ? ADMITTED[answer.answer] || ["", answer.answer] : ["", ""]));
  $("admit").hidden = !answer;
  setText($("admit-words"), words ?? (answer?.answer === "no" ? "The server would not refuse it; the promises could not all be kept at once." : ""));
  $("reasons").replaceChildren(...(answer ? [...answer.backends.flatMap((row) => [admissionWords(row), ...row.reasons]), ...answer.reasons] : [])
    .map((text) => element("li", {}, element("p", {}, f.plain(text)))));
}

// What others changed since the text was loaded; the text stays as it was typed.
async function showConflict(number) {
  const {kind, name, version} = page.base;
  const rows = await versions(kind, name);
  if (number !== page.turn || !rows.length) return;
  const [newest] = rows;
  page.conflict = newest.ended_us ? 0 : newest.version;
  const since = rows.filter((row) => row.version > version);
  showVersions($("conflict-versions"), since.length ? since : [newest]);
  $("conflict-view").href = shownAt(kind, name);
  setText($("conflict-keep"), page.conflict ? `I have seen it: mine replaces version ${page.conflict}` : "I have seen it: mine begins again");
  $("conflict").hidden = false;
}

function keepMine() {
  page.base.version = page.conflict;
  check();
}

// Whether backends can take it is a question about agreements alone.
const isAgreement = (text) => /^\s*["']?kind["']?\s*:\s*["']?SLA\b/m.test(text);

async function check() {
  const number = ++page.turn;
  const text = $("text").value;
  page.checked = null;
  $("apply").disabled = true;
  if (!text.trim() || !page.shell.signedIn()) return;
  const [tried, admitted] = await Promise.all([
    call("POST", address({dry_run: 1}), text).then(({status, body}) => ({body: status === 202 ? null : body}), (error) => ({error})),
    isAgreement(text) ? call("POST", "/admission", text).then(({body}) => ({body}), (error) => ({error})) : {}]);
  if (number !== page.turn) return;
  const {error, body} = tried;
  showProblems(error?.errors || admitted.error?.errors || []);
  setBadge($("valid"), ...(error ? ["bad", "not valid"] : body ? ["ok", "valid"] : ["warn", "not known"]));
  setText($("valid-words"), error ? error.message : body ? allWords(body) : "The server has not answered yet. Change something, or wait and try again.");
  showAdmission(admitted.body, error ? "" : admitted.error?.message);
  $("conflict").hidden = true;
  if (error?.status === 409 && page.base) await showConflict(number);
  if (number !== page.turn) return;
  page.checked = body ? text : null;
  page.admitted = admitted.body;
  $("apply").disabled = !page.checked;
}

const valuesOf = () => Object.fromEntries([...new FormData($("fields"))].map(([name, value]) => [name, value.trim()]));

// Fields of other kinds, and of what was not chosen, are not there: neither seen, nor asked for, nor sent.
function showFields() {
  for (const group of $("fields").querySelectorAll("[data-kind]")) group.hidden = group.disabled = group.dataset.kind !== page.kind;
  const chosen = [...$("fields").querySelectorAll("[data-chooses]:enabled")].map((select) => select.value);
  for (const label of $("fields").querySelectorAll("[data-of]")) {
    label.hidden = !label.dataset.of.split(" ").some((each) => chosen.includes(each));
    for (const field of label.querySelectorAll("input, select")) field.disabled = label.hidden;
  }
}

function onFields() {
  showFields();
  if (!$("fields").checkValidity()) return;
  $("text").value = compose(page.kind, valuesOf());
  check();
}

// A field that is left says that it changed: what was checked is not asked again, or a click on the button would be lost.
function onEdit() {
  showFields();
  if (page.checked !== null && $("fields").checkValidity() && compose(page.kind, valuesOf()) === page.checked) return;
  $("apply").disabled = true;
  soon(onFields);
}

// Another kind is another document: what was written stays until a field is changed.
function showKind(kind) {
  page.kind = isKind(kind) ? kind : "SLA";
  $("kind").value = page.kind;
  setText($("known-in"), `sla explain ${page.kind}.spec`);
  showFields();
  suggest();
}

// What is in force may have more than the fields know: its text is changed, the fields are there for whoever asks.
function asText(is) {
  $("fields").hidden = is;
  $("fields-note").hidden = is;
  $("as-text").hidden = !is;
}

const soon = (what) => { clearTimeout(page.timer); page.timer = setTimeout(what, PAUSE_MS); };

export async function start(shell) {
  page.shell = shell;
  const ask = startForm(shell, $("apply-dialog"), {
    consequence: () => `${$("valid-words").textContent} ${page.admitted?.answer === "no" ? "It cannot be kept beside what is promised already." : ""}`,
    send: () => call("POST", address(), page.checked).catch((error) => {
      if (error.status === 409) check(); // changed since it was checked: what changed is shown behind the dialog
      throw error;
    }),
    done: ({body}) => {
      const {name, kind = "SLA"} = body?.applied?.[0] || {};
      if (name && shownAt(kind, name)) location.assign(shownAt(kind, name));
      else if (name) shell.notice(`${name} is in force.`);
    }});
  for (const kind of ["input", "change"]) $("fields").addEventListener(kind, onEdit);
  $("kind").addEventListener("change", () => { asText(false); showKind($("kind").value); soon(onFields); });
  $("begin-again").addEventListener("click", () => asText(false));
  $("fields").addEventListener("submit", (event) => event.preventDefault());
  $("text").addEventListener("input", () => { $("apply").disabled = true; soon(check); });
  $("apply").addEventListener("click", () => page.checked && ask());
  $("conflict-keep").addEventListener("click", keepMine);
  $("fields").querySelector("[name=start]").value = `${wallTime(Date.now() + HOUR_MS).slice(0, 13)}:00`;
  await begin(Object.fromEntries(new URLSearchParams(location.search)));
}

// What the address asks for: a document in force as text, or a kind with some fields filled in.
async function begin({kind = "SLA", name = "", ...fields}) {
  showKind(kind);
  const known = name && await inForce(page.kind, name);
  if (known) {
    $("text").value = known.document || "";
    asText(true);
    page.base = {kind: page.kind, name: known.name, version: known.version};
    setText($("heading"), `Change ${noun(page.kind)} ${known.name}`);
    return;
  }
  for (const [key, value] of Object.entries({name, ...fields})) {
    const field = [...$("fields").elements].find((each) => each.name === key && !each.closest(":disabled"));
    if (field) field.value = value;
  }
  showFields();
}

// Names of recipients that a route may have.
async function suggest() {
  if (page.kind !== "Route") return;
  const rows = (await read("/recipients"))?.items || [];
  $("known-recipients").replaceChildren(...rows.map((row) => element("option", {value: row.name})));
  if (!rows.length) setText($("route-note"), "There is no recipient yet: make one first.");
}

export function onSession() {
  $("editor").hidden = !page.shell.signedIn();
  $("not-here").hidden = page.shell.signedIn();
  check();
}
