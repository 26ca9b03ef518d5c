// A form in a dialog: while it is filled in, it says what would come of it; what is wrong with it is said there, too.

import {setText} from "./dom.js";

const PAUSE_MS = 300;

// consequence(given): words, or a promise of {words, bad}; send(given) when it is submitted; then done(answer). What was
// sent is on its way until it is answered: it is sent once, however often the button is pressed.
export function startForm(shell, dialog, {consequence, send, done = () => {}}) {
  const form = dialog.querySelector("form");
  const said = form.querySelector(".consequence");
  const problem = form.querySelector(".problem");
  let turn = 0; // an answer to what was typed before is dropped
  let timer = 0;
  let opening = 0; // an answer to what was sent before does not close it
  let sending = -1; // by which opening
  const force = form.querySelector(".force");
  const forget = () => { // a refusal, and what was meant all the same, is of what was sent
    problem.hidden = true;
    if (force) force.hidden = true;
    if (force) force.querySelector("input").checked = false;
  };
  const given = () => Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
  const say = async () => {
    const number = ++turn;
    let found = {words: "", bad: false};
    if (form.checkValidity()) {
      try {
        const answer = await consequence(given());
        found = typeof answer === "string" ? {words: answer, bad: false} : answer;
      } catch (error) {
        found = {words: error.message, bad: true};
      }
    }
    if (number !== turn) return;
    said.classList.toggle("problem-words", found.bad);
    setText(said, found.words);
  };
  for (const kind of ["input", "change"]) {
    form.addEventListener(kind, (event) => {
      if (event.target.name !== "force") forget();
      clearTimeout(timer);
      timer = setTimeout(say, PAUSE_MS);
    });
  }
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (sending === opening) return;
    const number = sending = opening;
    try {
      const answer = await send(given());
      const isOpen = number === opening;
      if (isOpen) dialog.close();
      shell.said(answer, isOpen ? "" : "What was sent before the dialog was closed is done.");
      done(answer);
    } catch (error) {
      if (number !== opening) shell.notice(error.message);
      else {
        forget();
        problem.hidden = false;
        setText(problem, error.message);
        if (force) force.hidden = error.status !== 409; // what it breaks may be meant
      }
    } finally {
      if (sending === number) sending = -1;
    }
  });
  form.querySelector("[value=cancel]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { opening += 1; });
  return () => {
    form.reset();
    turn += 1;
    forget();
    setText(said, "");
    dialog.showModal();
    say();
  };
}
