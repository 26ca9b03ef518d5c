// The time zone that all times of the page are shown in: chosen in the footer, kept in this browser.

import {element} from "./dom.js";

const KEY = "sla-time-zone";
const DAY_MS = 86400e3;
const SLOT_MS = 900e3; // clocks change at a quarter of an hour, if at all
const own = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";

function isKnown(name) {
  try {
    return Boolean(new Intl.DateTimeFormat("en", {timeZone: name}));
  } catch {
    return false;
  }
}

function server() {
  const name = document.body.dataset.serverZone;
  return name && isKnown(name) ? name : "UTC";
}

// browser, server or the name of a zone.
function chosen() {
  let name = null;
  try {
    name = localStorage.getItem(KEY);
  } catch {
    // no storage here: the browser's zone
  }
  return name && (name === "server" || isKnown(name)) ? name : "browser";
}

const CHOSEN = chosen();
export const zone = CHOSEN === "server" ? server() : CHOSEN === "browser" ? own() : CHOSEN;

const offsets = new Map();
const wall = new Intl.DateTimeFormat("sv-SE", {timeZone: zone, dateStyle: "short", timeStyle: "medium"});

// How far its clock is ahead of UTC at a time, ms.
function offset(ms) {
  const slot = Math.floor(ms / SLOT_MS);
  if (!offsets.has(slot)) offsets.set(slot, Date.parse(`${wall.format(slot * SLOT_MS).replace(" ", "T")}Z`) - slot * SLOT_MS);
  return offsets.get(slot);
}

const shifted = (ms) => new Date(ms + offset(ms));

// Date and time on its clock, as fields of date and time take it, and charts: 2026-10-03T14:00:00.
export const wallTime = (ms) => shifted(ms).toISOString().slice(0, 19);
export const hourOf = (ms) => shifted(ms).getUTCHours();
export const dayKey = (ms) => shifted(ms).toISOString().slice(0, 10);

// The time in ms at which its clock shows this; NaN for what is no time. As the server reads it: the first of a time
// that comes twice, and of one that is skipped the next there is.
export function fromWall(text) {
  const shown = Date.parse(`${text.length === 16 ? `${text}:00` : text}Z`);
  if (Number.isNaN(shown)) return NaN;
  const [before, after] = [offset(shown - DAY_MS), offset(shown + DAY_MS)];
  if (offset(shown - before) === before) return shown - before;
  let ms = shown - after;
  while (offset(ms) !== after && ms < shown - before) ms = (Math.floor(ms / SLOT_MS) + 1) * SLOT_MS;
  return ms;
}

const formats = new Map();

// A time in words, by the options of Intl.DateTimeFormat; in the page's zone, or in one that they name.
export function words(ms, options) {
  const key = JSON.stringify(options);
  if (!formats.has(key)) formats.set(key, new Intl.DateTimeFormat("en-GB", {timeZone: zone, ...options}));
  return formats.get(key).format(ms);
}

export function startZone(select) {
  const option = (value, text) => element("option", {value, selected: value === CHOSEN}, text);
  const names = Intl.supportedValuesOf ? Intl.supportedValuesOf("timeZone") : [];
  select.replaceChildren(option("browser", `this browser's (${own()})`), option("UTC", "UTC"), option("server", `the server's (${server()})`),
    element("optgroup", {label: "Zones"}, ...names.filter((name) => name !== "UTC").map((name) => option(name, name))));
  select.addEventListener("change", () => {
    try {
      localStorage.setItem(KEY, select.value);
    } finally {
      location.reload();
    }
  });
}
