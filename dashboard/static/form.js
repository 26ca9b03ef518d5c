// A form in a dialog: while it is filled in, it says what would come of it; what is wrong with it is said there, too.

import {setText} from "./dom.js";

const PAUSE_MS = 300;

// consequence(given): words, or a promise of {words, bad}; send(given) when it is submitted; then done(answer).
export function startForm(dialog, {consequence, send, done = () => {}}) {
  const form = dialog.querySelector("form");
  const said = form.querySelector(".consequence");
  const problem = form.querySelector(".problem");
  let turn = 0; // an answer to what was typed before is dropped
  let timer = 0;
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
  for (const kind of ["input", "change"]) form.addEventListener(kind, () => { clearTimeout(timer); timer = setTimeout(say, PAUSE_MS); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const answer = await send(given());
      dialog.close();
      done(answer);
    } catch (error) {
      problem.hidden = false;
      setText(problem, error.message);
      const force = form.querySelector(".force");
      if (force) force.hidden = error.status !== 409; // what it breaks may be meant
    }
  });
  form.querySelector("[value=cancel]").addEventListener("click", () => dialog.close());
  return () => {
    form.reset();
    turn += 1;
    problem.hidden = true;
    form.querySelector(".force")?.toggleAttribute("hidden", true);
    setText(said, "");
    dialog.showModal();
    say();
  };
}
