// Ranges of the past: the end of what is shown is in the address (until, µs UTC). Without it a range ends now, and moves on.

import {follow} from "./address.js";
import {element} from "./dom.js";
import {fromWall, wallTime} from "./zone.js";

// The end in ms; null: now. What is no time that has passed is now.
export function untilMs(address, lengthMs) {
  const ms = Number(address.get().until) / 1000;
  return ms > lengthMs && ms < Date.now() ? ms : null;
}

// For a query of the server. What ends now ends by its clock: by that of a browser which is behind, the newest were left out.
export const spanOf = (fromMs, untilOrNull) => ({from_us: Math.round(fromMs * 1000), ...(untilOrNull === null ? {} : {to_us: Math.round(untilOrNull * 1000)})});

const at = (ms) => ({until: ms < Date.now() ? String(Math.round(ms) * 1000) : ""});

// Links to half a range earlier, later and now, and the field with the end.
export function showMoves(nav, field, address, lengthMs) {
  const until = untilMs(address, lengthMs);
  const end = until ?? Date.now();
  const links = [["Earlier", at(end - lengthMs / 2)], ...(until === null ? [] : [["Later", at(end + lengthMs / 2)], ["Now", {until: ""}]])];
  nav.replaceChildren(...links.map(([words, changes]) => follow(address, element("a", {}, words), changes)));
  field.value = until === null ? "" : wallTime(until);
}

export function startUntil(field, address) {
  field.addEventListener("change", () => address.go(at(field.value ? fromWall(field.value) : NaN)));
}
