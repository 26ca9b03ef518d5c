// The detail of a volume or of a promise: why it is throttled or at risk, now or at a time, in the server's words.
// It is opened by its address (#why/volume/NAME, #why/sla/NAME/OBJECTIVE, with a time in µs behind it), so that it
// can be linked to. A view of one thing has the same in its place (startInline).

import {call} from "./api.js";
import {element, setText} from "./dom.js";
import {moment as said, plain} from "./format.js";
import {fromWall, wallTime, zone} from "./zone.js";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 3000;
const LAST_US = 6e16; // in the year 3871
const REST = 10; // times what the last answer took: of a very large installation some seconds
const BADGES = {throttled: "warn", observed: "warn", "at-risk": "warn", violated: "bad", "no-data": "warn", kept: "ok", free: "ok"};
let shown = null; // {kind, name, objective}, while the detail is open
let asked = 0; // answers of an older question are dropped
let nextMs = 0;

export function whyAddress(kind, name, objective = "", atUs = "") {
  const parts = [name, ...(objective || atUs ? [objective] : []), ...(atUs ? [String(atUs)] : [])];
  return `#why/${kind}/${parts.map(encodeURIComponent).join("/")}`;
}

function parse(hash) {
  let parts;
  try {
    parts = hash.slice(1).split("/").map(decodeURIComponent);
  } catch {
    return null; // a % that stands for nothing: the rest of the page is as good without it
  }
  const [what, kind, name, objective, atUs] = parts;
  if (atUs && !(Math.abs(Number(atUs)) < LAST_US)) return null; // what no clock shows
  return what === "why" && name ? {kind, name, objective, atUs} : null;
}

// The time in the field, in milliseconds; null: now. What cannot be asked is refused here, in the page's own words.
function moment(at) {
  if (!at) return null;
  const given = Number(shown.atUs) / 1000;
  const ms = given && fromWall(at) === fromWall(wallTime(given)) ? given : fromWall(at); // also the second of an hour that comes twice
  if (Number.isNaN(ms)) throw new Error(`At: ${at} is no time. Choose another one`);
  if (ms > Date.now()) throw new Error(`At: ${said(ms * 1000)} lies ahead of now, ${said(Date.now() * 1000)}. Choose a time that has passed`);
  if (ms < 0) throw new Error(`At: ${said(ms * 1000)} lies before 1970-01-01, where times begin. Choose a later one`);
  return ms;
}

function question({kind, name, objective}, ms = null) {
  const query = new URLSearchParams({kind, tz: zone});
  if (objective) query.set("objective", objective);
  if (ms !== null) query.set("at_us", String(ms * 1000));
  return `/why/${encodeURIComponent(name)}?${query}`;
}

// prefix: of the ids of the elements that hold status, headline and sections.
function showAnswer(prefix, answer) {
  const sections = $(`${prefix}-sections`);
  $(`${prefix}-status`).className = `badge ${BADGES[answer.status] || ""}`.trim();
  setText($(`${prefix}-status`), answer.status.replaceAll("-", " "));
  setText($(`${prefix}-headline`), plain(answer.headline));
  const text = JSON.stringify(answer.sections);
  if (sections.dataset.shown === text) return; // a selection or the place scrolled to survives
  sections.dataset.shown = text;
  sections.replaceChildren(...answer.sections.flatMap(({title, lines}) => [
    element("dt", {}, title), element("dd", {}, ...lines.map((line) => element("p", {}, plain(line))))]));
}

async function refresh() {
  if (!shown) return;
  const number = ++asked;
  const beganMs = Date.now();
  let answer;
  try {
    answer = (await call("GET", question(shown, moment($("why-at").value)))).body;
  } catch (error) {
    answer = {status: "unknown", headline: error.message, sections: []};
  }
  if (number !== asked || !shown) return;
  nextMs = Date.now() + REST * (Date.now() - beganMs);
  showAnswer("why", answer);
}

// The answer of now in a sentence; "" if there is none.
export const headlineOf = (kind, name, objective) => call("GET", question({kind, name, objective}))
  .then(({body}) => plain(body.headline), () => "");

// What a view says of the thing it shows, now.
export function startInline(prefix, what) {
  let next = 0;
  const ask = async () => {
    if (document.hidden || Date.now() < next) return;
    const beganMs = Date.now();
    const answer = await call("GET", question(what())).then(({body}) => body, (error) =>
      error.status ? {status: "unknown", headline: error.message, sections: []} : null);
    next = Date.now() + REST * (Date.now() - beganMs);
    if (answer) showAnswer(prefix, answer);
  };
  setInterval(ask, REFRESH_MS);
  return ask();
}

function follow() {
  shown = parse(location.hash);
  if (!shown) {
    $("why-dialog").close();
    return;
  }
  const ms = Number(shown.atUs) / 1000;
  $("why-at").value = ms ? wallTime(ms) : "";
  setText($("why-title"), [shown.name, shown.objective].filter(Boolean).join("/"));
  setText($("why-headline"), "");
  $("why-sections").replaceChildren();
  delete $("why-sections").dataset.shown;
  if (!$("why-dialog").open) $("why-dialog").showModal();
  refresh();
}

export function startWhy() {
  addEventListener("hashchange", follow);
  $("why-dialog").addEventListener("close", () => {
    shown = null;
    $("why-at").value = "";
    if (parse(location.hash)) history.replaceState(null, "", location.pathname + location.search);
  });
  $("why-at").addEventListener("change", refresh);
  $("why-now").addEventListener("click", () => { $("why-at").value = ""; refresh(); });
  $("why-close").addEventListener("click", () => $("why-dialog").close());
  setInterval(() => { if (!document.hidden && !$("why-at").value && Date.now() >= nextMs) refresh(); }, REFRESH_MS);
  follow();
}
