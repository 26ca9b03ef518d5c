// A heat map: a table of coloured cells, each with its words; a cell that leads on is a button.

import {element} from "./dom.js";
import {dayKey, hourOf, words} from "./zone.js";

// rows: [{label, cells: [{cls, text, words, onclick, pressed} | null]}]; drawn anew only when something changed.
export function drawHeat(table, corner, heads, rows) {
  const shown = JSON.stringify([heads, rows]);
  if (table.dataset.shown === shown) return;
  table.dataset.shown = shown;
  table.replaceChildren(
    element("thead", {}, element("tr", {}, element("th", {scope: "col"}, corner),
      ...heads.map((text) => element("th", {scope: "col"}, text)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, element("th", {scope: "row"}, row.label), ...row.cells.map(cellOf)))));
}

// Hours of a period by the day of the page's time zone. Where clocks go back an hour comes twice: the second time it
// has a row of its own, so that none hides the other.
export function daysOf(hours, cellFor) {
  const days = new Map();
  for (const hour of hours) {
    const ms = hour.hour_us / 1000;
    const column = hourOf(ms);
    const day = words(ms, {weekday: "short", day: "numeric", month: "short"});
    const first = dayKey(ms);
    const again = `${first} again`;
    const isTaken = days.get(first)?.cells[column];
    const key = isTaken ? again : first;
    if (!days.has(key)) days.set(key, {label: isTaken ? `${day}, again` : day, cells: Array(24).fill(null)});
    days.get(key).cells[column] = cellFor(hour);
  }
  return [...days.values()];
}

function cellOf(cell) {
  if (!cell) return element("td", {});
  const text = cell.text ?? "";
  const inside = cell.onclick ? [element("button", {type: "button", class: "bare", "aria-label": cell.words,
    "aria-pressed": String(Boolean(cell.pressed)), onclick: cell.onclick}, text)]
    : [text, element("span", {class: "hidden"}, cell.words)];
  return element("td", {class: cell.cls, title: cell.words}, ...inside);
}
