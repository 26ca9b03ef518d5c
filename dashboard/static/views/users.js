// Who may come in: accounts, sessions of browsers and API tokens, one list at a time. Administrators see and change all
// of them; everybody else has their own sessions.

import {ask} from "../ask.js";
import {call, read} from "../api.js";
import {code} from "../cells.js";
import {element, fillTable, setBadge, setText} from "../dom.js";
import {startForm} from "../form.js";
import * as f from "../format.js";
import {startList} from "../list.js";

const $ = (id) => document.getElementById(id);
const MAY = {viewer: "reads, and asks what would be", operator: "also changes agreements, throttles, modes and policies",
  admin: "also decides who may come in, and which gateways there are"};
let page = null; // the shell
let list = null;
let about = null; // the account that a dialog is about

const at = (kind, name) => `/${kind}/${encodeURIComponent(name)}`;
const sees = (labels) => (labels ? `and sees agreements with ${labels} alone` : "");
const may = (role, labels) => [MAY[role], sees(labels)].filter(Boolean).join(", ");
const isAdmin = () => page.role() === "admin";
const button = (label, onclick) => element("button", {type: "button", onclick}, label);

// Buttons that are made once and look the row up when they are pressed: the list is drawn again each five seconds.
function fillActions(td, row, key, actions) {
  td.row = row;
  if (td.dataset.actions === key) return;
  td.dataset.actions = key;
  td.replaceChildren(...actions.flatMap(([label, act]) => [button(label, () => act(td.row)), " "]));
}

function fillRole(td, row) {
  if (!td.firstChild) td.append(element("span"), element("small"));
  setText(td.firstChild, row.role);
  setText(td.lastChild, row.labels || (row.role === "viewer" ? "all agreements" : ""));
}

async function ends(name) {
  const answer = await read(`/sessions?account=${encodeURIComponent(name)}&limit=1`);
  const whose = answer ? `${f.plural(answer.count, "session")} of ${name}` : `All sessions of ${name}`;
  const verb = answer?.count === 1 ? "ends" : "end";
  return `${whose} ${verb}${name === page.account() ? ": you are signed out, too." : " at once."}`;
}

const asked = (title, label, words, send, said) => ask(page, {title, button: label, words, send,
  done: () => { page.notice(said); list.refresh(); }});

const signOut = ({name}) => asked(`Sign ${name} out everywhere?`, "Sign out", () => ends(name),
  () => call("DELETE", `/sessions?account=${encodeURIComponent(name)}`), `${name} is signed out everywhere.`);
const disable = ({name}) => asked(`Disable ${name}?`, "Disable",
  async () => `${name} cannot sign in any more. ${await ends(name)} API tokens that ${name} made are worth nothing meanwhile.`,
  () => call("PUT", at("users", name), {enabled: false}), `${name} is disabled.`);
const enable = ({name, role, labels}) => asked(`Enable ${name}?`, "Enable", `${name} may sign in again, and ${may(role, labels)}.`,
  () => call("PUT", at("users", name), {enabled: true}), `${name} is enabled.`);
const remove = ({name}) => asked(`Delete ${name}?`, "Delete",
  async () => `${await ends(name)} API tokens that ${name} made are worth nothing any more. The audit log keeps what ${name} did.`,
  () => call("DELETE", at("users", name)), `${name} is deleted.`);
const endSession = (row) => asked("End this session?", "End",
  `${row.account || "The local administrator"} is signed out in ${row.browser || "that browser"} at ${row.address || "an address that is not known"}`
    + `${row.is_this ? ": it is the one that you look at now." : "; others go on."}`,
  () => call("DELETE", at("sessions", row.session_id)), "The session has ended.");
const revoke = (row) => asked(`Revoke ${row.name}?`, "Revoke",
  `Programs that use this token (${row.role}, made by ${row.created_by}) are refused at once. It cannot be given back.`,
  () => call("DELETE", at("tokens", row.token_id)), `${row.name} is revoked.`);

function startDialogs() {
  const finish = (words) => () => { page.notice(words()); list.refresh(); };
  let typed = {};
  const add = startForm(page, $("user-add-dialog"), {
    consequence: ({name, role, labels}) => `${name} may sign in at /login, and ${may(role, labels)}.`,
    send: ({name, role, labels}) => {
      typed = {name};
      return call("POST", "/users", {name, role, labels, password: $("user-add-form").elements.password.value});
    },
    done: finish(() => `${typed.name} is added.`)});
  const change = startForm(page, $("user-change-dialog"), {
    consequence: async ({role, labels}) => `${about.name} was ${about.role}${about.labels ? ` for ${about.labels}` : ""}, and ${may(role, labels)} from now on. ${await ends(about.name)}`,
    send: ({role, labels}) => call("PUT", at("users", about.name), {role, labels}),
    done: finish(() => `${about.name} is changed.`)});
  const password = startForm(page, $("password-dialog"), {
    consequence: async () => (about.name === page.account() ? `Your other sessions end, and you sign in with this password from now on.`
      : `${about.name} signs in with this password from now on. ${await ends(about.name)}`),
    send: () => {
      const {password: next, current} = $("password-form").elements;
      return call("PUT", `${at("users", about.name)}/password`, {password: next.value, current: current.value});
    },
    done: finish(() => `${about.name} has another password.`)});
  const token = startForm(page, $("token-dialog"), {
    consequence: ({name, role, labels, days}) => `Who has the token of ${name} ${may(role, labels)}, until ${f.moment((Date.now() + days * 86400e3) * 1000)}. `
      + "It may never do more than you may, and is worth nothing while your account is disabled.",
    send: ({name, role, labels, days}) => call("POST", "/tokens", {name, role, labels, days: Number(days)}),
    done: ({body}) => {
      setText($("secret"), body.token);
      $("secret-dialog").showModal();
      list.refresh();
    }});
  $("secret-close").addEventListener("click", () => $("secret-dialog").close());
  $("secret-dialog").addEventListener("close", () => setText($("secret"), ""));
  return {add, token,
    change: (row) => {
      about = row;
      setText($("user-change-title"), `Change ${row.name}`);
      change();
      const {role, labels} = $("user-change-form").elements;
      [role.value, labels.value] = [row.role, row.labels];
      role.dispatchEvent(new Event("change", {bubbles: true}));
    },
    password: (row) => {
      about = row;
      setText($("password-title"), `Set the password of ${row.name}`);
      const isOwn = row.name === page.account();
      $("password-current").hidden = !isOwn;
      $("password-form").elements.current.required = isOwn;
      password();
    }};
}

function accounts(dialogs) {
  return {path: "/users", title: "Accounts", addLabel: "Add an account…", add: dialogs.add,
    about: () => "Who may sign in, and what they may do. A change of an account ends its sessions.",
    empty: () => ["There is no account: only ", code("sla login"), " on the server’s machine signs a browser in. ",
      "Add one here, or with ", code("sla user add NAME --role viewer"), "."],
    keyOf: (row) => row.name,
    columns: [
      {label: "State", cls: "head", fill: (td, row) => {
        if (!td.firstChild) td.append(element("span"));
        setBadge(td.firstChild, row.state === "active" ? "ok" : "warn", row.state);
      }},
      {label: "Account", cls: "wrap head", text: (row) => [row.name, row.identity ? "signs in through the provider" : ""]},
      {label: "Role", fill: fillRole},
      {label: "Since", text: (row) => f.moment(row.created_us)},
      {label: "", cls: "full", fill: (td, row) => fillActions(td, row, `${row.state}|${row.identity}`, [
        ...(row.identity ? [] : [["Change…", dialogs.change], ["Password…", dialogs.password]]),
        ["Sign out…", signOut], row.state === "active" ? ["Disable…", disable] : ["Enable…", enable], ["Delete…", remove]])},
    ]};
}

const sessions = () => ({path: "/sessions", title: "Sessions", addLabel: "",
  about: () => (isAdmin() ? "Browsers that are signed in." : "Browsers in which you are signed in; administrators see all."),
  empty: () => ["No browser is signed in. ", element("a", {href: "/login"}, "Sign in"), "."],
  keyOf: (row) => row.session_id,
  columns: [
    {label: "Account", cls: "wrap head", text: (row) => [row.account || "local administrator", row.is_this ? "this browser" : ""]},
    {label: "Role", fill: fillRole},
    {label: "From", cls: "wrap", text: (row) => [row.address || f.DASH, row.browser || ""]},
    {label: "Since", text: (row) => f.moment(row.created_us)},
    {label: "Until", text: (row) => f.moment(row.expires_us)},
    {label: "", cls: "full", fill: (td, row) => fillActions(td, row, "end", [["End…", endSession]])},
  ]});

const tokens = (dialogs) => ({path: "/tokens", title: "API tokens", addLabel: "Make an API token…", add: dialogs.token,
  about: () => "For programs. A token may do no more than the account that made it may do now.",
  empty: () => ["No program has an API token. Make one here, or with ", code("sla token create NAME --role viewer"), "."],
  keyOf: (row) => row.token_id,
  columns: [
    {label: "Program", cls: "wrap head", text: (row) => [row.name, `made by ${row.created_by}`]},
    {label: "Role", fill: fillRole},
    {label: "Since", text: (row) => f.moment(row.created_us)},
    {label: "Ends", text: (row) => [f.moment(row.ends_us), row.ends_us < row.expires_us ? "its maker has not signed in lately" : ""]},
    {label: "", cls: "full", fill: (td, row) => fillActions(td, row, "revoke", [["Revoke…", revoke]])},
  ]});

let shown = null;
const maySee = () => isAdmin() || (shown.path === "/sessions" && Boolean(page.role()));

function showWhyNot() {
  const words = page.role() ? [`${shown.title} are shown to administrators alone. You are ${page.role()}.`]
    : [`${shown.title} are not shown to everybody: `, element("a", {href: "/login"}, "sign in"), "."];
  fillTable($("users"), shown.columns, [], shown.keyOf, () => words);
}

export function start(shell) {
  page = shell;
  const wanted = new URLSearchParams(location.search).get("show");
  const dialogs = startDialogs();
  shown = {sessions, tokens}[wanted]?.(dialogs) || accounts(dialogs);
  setText($("h-users"), shown.title);
  for (const link of $("users-tabs").children) {
    if (link.textContent === shown.title) link.setAttribute("aria-current", "true");
  }
  $("users-add").addEventListener("click", () => shown.add());
  setText($("users-add"), shown.addLabel);
}

// Nothing is asked for that would be refused: who looks is known first.
export function onSession() {
  $("users-add").hidden = !(isAdmin() && shown.addLabel);
  setText($("users-about"), shown.about());
  $("users-form").hidden = !maySee();
  if (!maySee() && list) location.reload();
  else if (!maySee()) showWhyNot();
  else if (list) list.refresh();
  else list = startList({...shown, id: "users", fields: {show: "accounts", match: "", offset: "0"}, mine: ["show"]});
}
