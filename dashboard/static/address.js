// What a list shows, in the query string of its address: it can be shared, and the back button works.

// fields: {name: default}. The form's fields of these names are filled from the address and written to it.
export function startAddress(fields, form, onChange) {
  const get = () => {
    const given = new URLSearchParams(location.search);
    return Object.fromEntries(Object.entries(fields).map(([name, value]) => [name, given.get(name) ?? value]));
  };
  const href = (changes) => {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries({...get(), ...changes})) {
      if (String(value) !== fields[name]) query.set(name, value);
    }
    const text = query.toString();
    return location.pathname + (text ? `?${text}` : "");
  };
  const go = (changes) => {
    const wanted = href(changes);
    if (wanted !== location.pathname + location.search) history.pushState(null, "", wanted);
    show();
  };
  const show = () => {
    for (const [name, value] of Object.entries(get())) {
      const field = form?.elements[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = value === "1";
      else field.value = value;
    }
    onChange();
  };
  const given = () => Object.fromEntries(Object.keys(fields).filter((name) => form.elements[name]).map((name) => {
    const field = form.elements[name];
    return [name, field.type === "checkbox" ? (field.checked ? "1" : "0") : field.value.trim()];
  }));
  // Another filter begins with its first page.
  const first = () => Object.fromEntries(["offset", "before", "after"].filter((name) => name in fields)
    .map((name) => [name, fields[name]]));
  form?.addEventListener("submit", (event) => { event.preventDefault(); go({...first(), ...given()}); });
  form?.addEventListener("change", () => go({...first(), ...given()}));
  addEventListener("popstate", show);
  return {get, href, go, show, first};
}

// A link to another state of this view: a real one, which opens in another window, too.
export function follow(address, node, changes) {
  node.setAttribute("href", address.href(changes));
  node.onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    address.go(changes);
  };
  return node;
}
