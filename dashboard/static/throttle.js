// The dialog that throttles a volume by hand, and says what that means for the volume while it is filled in.

import {call, read} from "./api.js";
import {ask} from "./ask.js";
import {setText} from "./dom.js";
import {startForm} from "./form.js";
import * as f from "./format.js";

const $ = (id) => document.getElementById(id);
const UNITS = {iops: 1, bytes_per_s: 1e6, cost_per_s: 1};
const page = {volume: "", open: null};

export function openThrottle(volume) {
  page.volume = volume;
  setText($("throttle-title"), `Throttle ${volume}`);
  page.open();
}

// "batch will be held to 300 IOPS until 14:20; it does 412 IOPS now."
async function consequence({rate, unit, duration}) {
  const {volume} = page;
  const live = (await read(`/volumes/${encodeURIComponent(volume)}`))?.live || {};
  const name = {iops: "ops_per_s", bytes_per_s: "bytes_per_s", cost_per_s: "cost_per_s"}[unit];
  const wanted = Number(rate) * UNITS[unit];
  const now = {iops: live.iops, bytes_per_s: live.bytes_per_s}[unit];
  const until = duration ? `until ${f.clock((Date.now() + duration * 1000) * 1000)}` : "until somebody releases it";
  const does = now === undefined ? "" : ` It does ${f.capWords({[name]: now})} now${wanted < now ? ": its I/Os will wait" : ", so nothing changes yet"}.`;
  return `${volume} will be held to ${f.capWords({[name]: wanted})} ${until}.${does}`;
}

export function startThrottle(shell) {
  page.open = startForm(shell, $("throttle-dialog"), {
    consequence,
    send: (given) => call("POST", "/throttles", {volume: page.volume, [given.unit]: Number(given.rate) * UNITS[given.unit],
      duration_s: given.duration ? Number(given.duration) : null, reason: given.reason, ...(given.force ? {force: true} : {})}),
    done: ({body}) => {
      if (body?.holds) shell.notice(`${page.volume} may do ${body.holds}: the floor that its agreement promises lies above the rate asked for.`);
    }});
}

// "batch is held to 300 IOPS now, and is free at once."
export function release(shell, volume, done) {
  ask(shell, {title: `Release ${volume}?`, button: "Release", done,
    words: async () => {
      const cap = f.volumeCap((await read(`/volumes/${encodeURIComponent(volume)}`))?.live || {});
      return `${volume} ${cap ? `is held to ${cap} now, and is` : "is"} free at once of what was set by hand. `
        + "Control may hold it back all the same while a promise is at risk.";
    },
    send: () => call("DELETE", `/throttles?volume=${encodeURIComponent(volume)}`)});
}
