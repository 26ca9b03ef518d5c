// The dialog that throttles a volume by hand.

import {call} from "./api.js";
import {setText} from "./dom.js";

const $ = (id) => document.getElementById(id);
const UNITS = {iops: 1, bytes_per_s: 1e6, cost_per_s: 1};

export function openThrottle(volume) {
  const form = $("throttle-form");
  form.reset();
  form.dataset.volume = volume;
  setText($("throttle-title"), `Throttle ${volume}`);
  form.querySelector(".problem").hidden = true;
  form.querySelector(".force").hidden = true;
  $("throttle-dialog").showModal();
}

export function startThrottle(shell) {
  const form = $("throttle-form");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(form));
    const rate = Number(given.rate) * UNITS[given.unit];
    const {volume} = form.dataset;
    try {
      const {body} = await call("POST", "/throttles", {volume, [given.unit]: rate,
        duration_s: given.duration ? Number(given.duration) : null, reason: given.reason, ...(given.force ? {force: true} : {})});
      $("throttle-dialog").close();
      if (body?.holds) shell.notice(`${volume} may do ${body.holds}: the floor that its agreement promises lies above the rate asked for.`);
    } catch (error) {
      form.querySelector(".problem").hidden = false;
      form.querySelector(".force").hidden = error.status !== 409; // it would break the volume's own promise
      setText(form.querySelector(".problem"), error.message);
    }
  });
  form.querySelector("[value=cancel]").addEventListener("click", () => $("throttle-dialog").close());
}

export const release = (shell, volume) => shell.change("DELETE", `/throttles?volume=${encodeURIComponent(volume)}`);
