// Tables and lists that are updated in place: focus, selection and scroll survive each second's refresh.

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Rows by key: existing nodes are updated, new ones made, gone ones removed, order as given.
function sync(parent, rows, keyOf, make, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  rows.forEach((row, index) => {
    const key = String(keyOf(row));
    let node = old.get(key);
    old.delete(key);
    if (!node) {
      node = make(row);
      node.dataset.key = key;
    }
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] || null);
    update(node, row);
  });
  for (const node of old.values()) node.remove();
}

// Each row carries its key as data-MARK, MARK being the table's own data-mark.
// columns: {label, cls, title, text(row) -> string | [strong, small], fill(td, row) for anything else}
export function fillTable(table, columns, rows, keyOf, empty) {
  if (!table.tHead) {
    const heads = columns.map((c) => element("th", {scope: "col", class: c.cls || null, title: c.title || null}, c.label));
    table.append(element("thead", {}, element("tr", {}, ...heads)), element("tbody"));
  }
  const body = table.tBodies[0];
  table.tHead.hidden = rows.length === 0;
  if (rows.length === 0) {
    if (!body.querySelector(".empty")) {
      body.replaceChildren(element("tr", {}, element("td", {class: "empty full", colspan: columns.length}, ...empty())));
    }
    return;
  }
  const make = (row) => element("tr", {[`data-${table.dataset.mark}`]: keyOf(row)}, ...columns.map((c) =>
    element("td", {class: c.cls || null, "data-label": c.label || null})));
  sync(body, rows, keyOf, make, (tr, row) => columns.forEach((column, index) => {
    const td = tr.children[index];
    if (column.fill) column.fill(td, row);
    else setPair(td, column.text(row));
  }));
}

export function setPair(td, value) {
  const [main, small] = Array.isArray(value) ? value : [value, ""];
  if (td.dataset.shown === `${main}|${small}`) return;
  td.dataset.shown = `${main}|${small}`;
  td.replaceChildren(main, ...(small ? [element("small", {}, small)] : []));
}

export function fillList(list, rows, keyOf, make, update, empty) {
  if (rows.length === 0) {
    const made = element("li", {class: "empty"}, element("p", {}, ...empty()));
    if (list.querySelector(".empty")?.textContent !== made.textContent) list.replaceChildren(made);
    return;
  }
  sync(list, rows, keyOf, make, update);
}

export function setBadge(node, cls, text, title = "") {
  const wanted = `badge ${cls}`.trim();
  if (node.className !== wanted) node.className = wanted;
  if (node.title !== title) node.title = title;
  setText(node, text);
}
