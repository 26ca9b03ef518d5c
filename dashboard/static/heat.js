// A heat map: a table of coloured cells, each with its words; a cell that leads on is a button.

import {element} from "./dom.js";

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

function cellOf(cell) {
  if (!cell) return element("td", {});
  const text = cell.text ?? "";
  const inside = cell.onclick ? [element("button", {type: "button", class: "bare", "aria-label": cell.words,
    "aria-pressed": String(Boolean(cell.pressed)), onclick: cell.onclick}, text)]
    : [text, element("span", {class: "hidden"}, cell.words)];
  return element("td", {class: cell.cls, title: cell.words}, ...inside);
}
