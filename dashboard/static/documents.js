// Documents in force that are no agreements: where they are listed, changed and ended, and what applying one does.

import {call, read} from "./api.js";
import {ask} from "./ask.js";
import {agreementAddress} from "./cells.js";
import {element, fillList, setText} from "./dom.js";
import * as f from "./format.js";

const PATHS = {Recipient: "/recipients", Route: "/routes", Calendar: "/calendars", VolumeLabels: "/volume-labels", Maintenance: "/maintenance"};
const NOUNS = {SLA: "agreement", Recipient: "recipient", Route: "route", Calendar: "calendar", VolumeLabels: "labels of volumes",
  Maintenance: "maintenance"};
const BEGUN = {
  SLA: "comes into force, and is judged from now on",
  Recipient: "comes into force; events go to it once a route names it",
  Route: "comes into force: such events go to its recipients from now on",
  Calendar: "comes into force; an agreement that names it counts its hours alone",
  VolumeLabels: "comes into force: its volumes have these labels at once, and agreements choose by them",
  Maintenance: "is announced: what it is about does not count meanwhile",
};
const REPLACED = {SLA: "slices are judged by it from now on"};
const ENDED = {
  Recipient: "No event goes there any more. While a route names it, it cannot be ended.",
  Route: "Its recipients get no event by it any more; other routes go on.",
  Calendar: "While an agreement names it, it cannot be ended.",
  VolumeLabels: "Its volumes have the labels again that other documents and their agents say; agreements choose by these.",
};
const SAYS = {
  Route: ({match, recipients}) => `${Object.entries(match || {}).filter(([, values]) => values.length).map(([key, values]) => `${key} ${values.join(", ")}`).join("; ") || "every event"} → ${recipients.join(", ")}`,
  Calendar: ({hours, holidays, tz}) => `${hours.map((one) => `${one.days.join(", ")} ${one.from}–${one.to}`).join("; ")} (${tz || "UTC"})`
    + `${holidays?.length ? `, ${f.plural(holidays.length, "holiday")}` : ""}`,
  VolumeLabels: ({volumes, labels}) => `${volumes.join(", ")}: ${Object.entries(labels).map(([key, value]) => (value === null ? `without ${key}` : `${key}=${value}`)).join(", ")}`,
};

export const noun = (kind) => NOUNS[kind] || kind;

export const changeAddress = (kind, name) => `/apply?${new URLSearchParams(kind === "SLA" ? {name} : {kind, name})}`;

// What would come of a document, by its row in the answer of applying it.
export function changeWords({kind = "SLA", name, version, changed}) {
  if (!changed) return `${name}: no change, version ${version} stays in force.`;
  if (version === 1) return `${name} ${BEGUN[kind] || "comes into force"}.`;
  return `${name}: version ${version} replaces version ${version - 1}${REPLACED[kind] ? `; ${REPLACED[kind]}` : ""}.`;
}

// Name, version and text of what is in force; null: there is none.
export async function inForce(kind, name) {
  if (kind === "SLA") return read(`/slas/${encodeURIComponent(name)}`);
  return (await read(PATHS[kind]))?.items.find((row) => row.name === name) ?? null;
}

export async function versions(kind, name) {
  const path = kind === "SLA" ? `/slas/${encodeURIComponent(name)}/versions` : `/documents/${kind}/${encodeURIComponent(name)}/versions`;
  return (await read(path))?.items || [];
}

// Where one is seen once it is applied.
export const shownAt = (kind, name) => ({SLA: agreementAddress(name), Recipient: "/events", Route: "/events", Calendar: "/agreements",
  VolumeLabels: "/volumes"})[kind] || "";

export const endDocument = (shell, kind, name, done) => ask(shell, {
  title: `End ${name}?`,
  button: "End it",
  words: ENDED[kind],
  send: () => call("DELETE", `${PATHS[kind]}/${encodeURIComponent(name)}`),
  done: (answer) => {
    if (answer.status === 200) shell.notice(`${name} has ended.`);
    done();
  }});

// A list of those of one kind; empty: what to say without any. Returns what reads it again.
export function startDocuments(shell, list, kind, empty) {
  const refresh = async () => {
    const answer = await read(PATHS[kind]);
    if (!answer) return;
    fillList(list, answer.items, (row) => row.name,
      (row) => element("li", {"data-document": row.name}, element("div", {}, element("strong", {}, row.name), " ", element("span", {class: "soft"})),
        element("p"), element("p", {class: "actions-left", hidden: true}, element("a", {href: changeAddress(kind, row.name), "aria-label": `Change ${row.name}`}, "Change"),
          element("button", {type: "button", "aria-label": `End ${row.name}`, onclick: () => endDocument(shell, kind, row.name, refresh)}, "End…"))),
      (li, row) => {
        setText(li.querySelector("span"), `version ${row.version}, ${f.moment(row.applied_us)} by ${row.applied_by || "?"}`);
        setText(li.querySelector("p"), row.spec?.spec ? SAYS[kind](row.spec.spec) : "");
        li.querySelector(".actions-left").hidden = !shell.signedIn();
      },
      () => [empty]);
  };
  return refresh;
}
