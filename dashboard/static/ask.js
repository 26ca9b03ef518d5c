// A question before something is done that needs no more than a yes: what it means, and a button that names it.

import {setText} from "./dom.js";
import {startForm} from "./form.js";

const $ = (id) => document.getElementById(id);
let asked = null;
let open = null;

// words: what comes of it, or a function that gives it, also later; send() when it is meant; then done(answer).
export function ask(shell, {title, button, words, send, done = () => {}}) {
  asked = {words, send, done};
  open ||= startForm(shell, $("ask-dialog"), {
    consequence: () => (typeof asked.words === "function" ? asked.words() : asked.words),
    // What is done is of the question that was sent: another one may be open by then.
    send: async () => { const {send: act, done: finish} = asked; return {...await act(), finish}; },
    done: ({finish, ...answer}) => finish(answer)});
  setText($("ask-title"), title);
  setText($("ask-apply"), button);
  open();
}
