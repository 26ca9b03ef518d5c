// A list that the server filters, sorts and pages. What is shown of it is in the address (address.js).

import {call} from "./api.js";
import {follow, startAddress} from "./address.js";
import {element, fillTable} from "./dom.js";
import {count} from "./format.js";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 5000;

// path: of the API; id: of the table, with #ID-form, #ID-pager around it; fields: {parameter: default};
// columns as of fillTable, each may have sort, the value of the parameter `sort` that it stands for;
// empty(): what to say when there is nothing at all; mine: fields that are the view's own, no parameters of the list;
// onShow(): the address changed.
export function startList({path, id, fields, columns, keyOf, empty, limit = 50, refreshMs = REFRESH_MS, mine = [], onAnswer, onShow}) {
  let turn = 0; // answers of an older question are dropped
  const table = $(id);
  const form = $(`${id}-form`);
  const pager = $(`${id}-pager`);
  const address = startAddress(fields, form, () => { onShow?.(); refresh(); });

  async function refresh() {
    const number = ++turn;
    const query = new URLSearchParams({limit});
    for (const [name, value] of Object.entries(address.get())) {
      if (value && value !== "0" && !mine.includes(name)) query.set(name, value);
    }
    let answer;
    try {
      answer = (await call("GET", `${path}?${query}`)).body;
    } catch (error) {
      if (number === turn && error.status) showNothing(error.message, () => [error.message]);
      return; // without an answer: the banner says that the server is away
    }
    if (number !== turn) return;
    onAnswer?.(answer, address);
    show(answer);
  }

  // Words in place of rows; the same ones stay, with the focus on a link in them.
  function showNothing(kind, words) {
    if (table.dataset.nothing === kind && table.querySelector(".empty")) return;
    table.dataset.nothing = kind;
    table.tBodies[0]?.replaceChildren();
    fillTable(table, columns, [], keyOf, words);
  }

  function show(answer) {
    if (answer.items.length) fillTable(table, columns, answer.items, keyOf);
    else if (isPlain()) showNothing("empty", empty);
    else showNothing("filtered", () => ["Nothing is like that. ", follow(address, element("a", {}, "Show all"), {...fields}), "."]);
    showHeads();
    showPager(answer);
  }

  const isPlain = () => Object.keys(fields).every((name) => mine.includes(name) || name === "sort" || address.get()[name] === fields[name]);

  function showHeads() {
    const {sort} = address.get();
    columns.forEach((column, index) => {
      if (!column.sort) return;
      const head = table.tHead.rows[0].cells[index];
      if (!head.firstElementChild) head.replaceChildren(element("a", {}, column.label));
      follow(address, head.firstElementChild, {...address.first(), sort: column.sort});
      head.setAttribute("aria-sort", sort === column.sort ? (column.falls ? "descending" : "ascending") : "none");
    });
  }

  function showPager({items, next, count: all, before}) {
    const links = [];
    if ("offset" in fields) {
      const words = items.length < all ? `${count(before + 1)} to ${count(before + items.length)} of ${count(all)}`
        : `${count(all)} in all`;
      if (before) links.push(follow(address, element("a", {rel: "prev"}, "Previous"), {offset: Math.max(0, before - limit)}));
      links.push(element("span", {class: "soft", role: "status"}, items.length ? words : ""));
      if (next) links.push(follow(address, element("a", {rel: "next"}, "Next"), {offset: Number(next)}));
    } else {
      const name = "before" in fields ? "before" : "after";
      const start = "sort" in fields && address.get().sort !== "newest" ? "First" : "Newest";
      if (address.get()[name]) links.push(follow(address, element("a", {rel: "prev"}, start), {[name]: ""}));
      if (next) links.push(follow(address, element("a", {rel: "next"}, name === "before" && start === "Newest" ? "Older" : "Next"), {[name]: next}));
    }
    const shown = links.map((node) => node.textContent + (node.getAttribute("href") || "")).join("|");
    if (!pager || pager.dataset.shown === shown) return; // the focus stays where it is
    pager.dataset.shown = shown;
    const had = pager.contains(document.activeElement) && document.activeElement.rel;
    pager.replaceChildren(...links);
    if (had) (pager.querySelector(`[rel=${had}]`) || pager.querySelector("a"))?.focus();
  }

  setInterval(() => { if (!document.hidden) refresh(); }, refreshMs);
  address.show();
  return {refresh, address};
}
