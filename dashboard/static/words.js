// Codes of the server in plain words. The code itself is shown as a title, for search and for commands.

import {setText} from "./dom.js";

// Of the audit log: what somebody did.
const ACTIONS = {
  "acknowledge": "acknowledged an event", "apply": "applied an agreement", "delete": "ended an agreement",
  "approval-request": "asked for approval", "approval-approved": "approved a change", "approval-refused": "refused a change",
  "approval-outdated": "a request for approval became void", "approval-expired": "a request for approval lapsed",
  "approval-withdrawn": "withdrew a request for approval", "approval-failed": "an approved change failed",
  "audit-pruned": "old entries left the audit log", "backend-mode": "changed which backends are enforced",
  "ca-init": "made the certificate authority", "ca-token": "made an enrolment token", "ca-issue": "issued a certificate",
  "ca-nbd": "issued a certificate for NBD", "ca-page": "issued the page's certificate", "ca-pair": "issued a certificate of the pair",
  "ca-revoke": "revoked a certificate", "gateway-listed": "listed a gateway to dial", "gateway-unlisted": "removed a gateway to dial",
  "login": "signed in", "login-code": "made a one-time address", "login-failed": "failed to sign in", "logout": "signed out",
  "mode": "changed the mode", "policy-mode": "changed how policies are used", "policy-pin": "pinned a policy",
  "policy-unpin": "unpinned the policy", "policy-rollback": "rolled the policy back",
  "recipient-test": "sent a test event to", "event-again": "sent an event again to", "report-issued": "issued a report",
  "sessions-end": "ended sessions", "throttle-release": "released a throttle", "throttle-set": "set a throttle",
  "token-create": "made an API token", "token-lapse": "an API token lapsed", "token-revoke": "revoked an API token",
  "user-add": "added an account", "user-change": "changed an account", "user-delete": "deleted an account",
  "user-password": "changed a password", "volume-approved": "approved a volume's owner", "volume-revoked": "revoked a volume's owner",
};
const DOCUMENTS = {maintenance: "maintenance", calendar: "a calendar", recipient: "a recipient", route: "a route", silence: "a silence", volumelabels: "labels of volumes"};

// A code that this page does not know, with blanks: it is from a newer server.
const spaced = (code) => code.replaceAll("-", " ");

export function action(code) {
  const [kind, verb] = [code.slice(0, code.lastIndexOf("-")), code.slice(code.lastIndexOf("-") + 1)];
  if (kind in DOCUMENTS && (verb === "applied" || verb === "ended")) return `${verb} ${DOCUMENTS[kind]}`;
  return ACTIONS[code] || spaced(code);
}

// Kinds of events are made of plain words but for these.
const KINDS = {"violation-opened": "promise broken", "violation-closed": "promise kept again", "unattributed": "no cause found",
  "infeasible": "more promised than there is", "sla": "agreement"};
const WORDS = {sla: "agreement", cut: "statistics", cuts: "statistics", nbd: "NBD", qmp: "QEMU monitor", ca: "certificate authority", sql: "database", ptmax: "polling time"};

export const eventKind = (code) => KINDS[code] || code.split("-").map((word) => WORDS[word] || word).join(" ");

// What an event is about: a volume, a gateway; an agreement's name or NAME/OBJECTIVE has the element "sla".
const ELEMENTS = {sla: "agreement", pmdaemon: "polling"};
export const elementWords = (code) => ELEMENTS[code] ?? spaced(code);

// Shows the words in a node, with the code as its title.
export function showWords(node, words, code) {
  setText(node, words);
  node.title = code;
}
