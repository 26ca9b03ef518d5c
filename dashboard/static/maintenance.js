// The dialog that announces maintenance of one agreement, in the time zone of the page.

import {call} from "./api.js";
import {startForm} from "./form.js";
import * as f from "./format.js";
import {fromWall, wallTime, zone} from "./zone.js";

const HOUR_MS = 3600e3;

function document_({start, duration, reason}, name, agreement) {
  const spec = {scope: {agreements: [agreement]}, start, duration, tz: zone, reason};
  return {apiVersion: "storage-sla/v1", kind: "Maintenance", metadata: {name}, spec};
}

// Returns what opens it.
export function startMaintenance(shell, done) {
  const agreement = shell.name;
  const dialog = document.getElementById("maintenance-dialog");
  let name = "";
  const open = startForm(shell, dialog, {
    consequence: async (given) => {
      const {body} = await call("POST", "/slas?dry_run=1", document_(given, name, agreement));
      const begins = fromWall(given.start);
      const ends = begins + parseInt(given.duration, 10) * HOUR_MS;
      const from = begins < Date.now() ? "now" : f.moment(begins * 1000); // it excuses nothing that was before
      return [...(ends < Date.now() ? [] : [`From ${from} to ${f.moment(ends * 1000)} (${zone}) bad slices of ${agreement} do not count, `
        + "and nobody is slowed down for it."]), ...(body?.warnings || []).map(f.sentence)].join(" ");
    },
    send: (given) => call("POST", "/slas", document_(given, name, agreement)),
    done});
  return () => {
    const start = wallTime(Date.now() + HOUR_MS).slice(0, 13);
    name = `work-${wallTime(Date.now()).replace(/[^0-9]/g, "")}-${Math.random().toString(16).slice(2, 6)}`;
    open();
    dialog.querySelector("[name=start]").value = `${start}:00`;
  };
}
