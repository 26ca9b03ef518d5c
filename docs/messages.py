"""Writes docs/formats/messages.md from the message classes of ``pmdaemon.wire.messages``: ``make docs``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

from pmdaemon.poller import channel_messages
from pmdaemon.wire import cut
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages import (
    agent,
    alerts,
    api,
    certificates,
    costs,
    ends,
    mirror,
    orders,
    plane_report,
    planes,
    server,
    space,
    thresholds,
)
from pmdaemon.wire.messages.base import Key, WireMessage, fields_of, form_of
from pmdaemon.wire.session import OWN_KINDS, TABLE, SessionState, Side

TARGET = Path(__file__).parent / "formats" / "messages.md"
COLUMNS = 116
OF_AGENT = (agent, thresholds, alerts, costs, space, certificates, ends)  # one conversation, in this order

HEAD = """\
# Messages

Generated from `pmdaemon/wire/messages/` and `pmdaemon/poller/channel_messages.py` by `make docs`; do not
edit.

A message is a frame (docs/formats/wire.md): a msgpack header and, where there is bulk, a binary blob; only
the daemon's parent and its pairs speak JSON with each other. This page lists the headers, with the keys in
the order of the wire. Types: `str`, `int`, `bool`, `bytes`, `float`; `gw` is a gateway_id (UUID as text, 16
bytes inside CUT); `ep` an epoch; times `*_us` are microseconds, wall-clock ones UTC. `key?` may be absent.
Unknown keys are ignored by the reader. Kinds are numbered in `pmdaemon/wire/kinds.py`.
"""
AGENT = """\
## Between agent and PMDaemon

The agent connects; each side speaks as this table allows. Any other frame in a state is a
`ProtocolViolation`. REGISTER is sent again when the exports change. The daemon's WELCOME, REGISTERED and
first POLL lead to the next state.
"""
AGENT_NOTES = """\
### Acknowledgement

`ack` of a POLL names, for each epoch with something outstanding, the highest *contiguous durable* seq. Only
an `ack` lets the agent forget a cut. A cut is made when a POLL arrives (or by the agent's own timer after
1.5 intervals without one); an answer holds at most 256 KB of cuts in order from `from`, and the newest cut
flagged LIVE if they do not reach it. A `from` behind the cut that follows the newest asks for no cut in
order, and for the newest as LIVE: so the server asks while dbmanager has no room ([ADR
14](../adr/0014-pause-after-a-refusal.md)).

A poll may be answered with several cuts: samples over another interval (by more than 10 % and 50 ms) or
with another threshold version get a cut of their own; CAPS makes an extra cut at once, and CAPS_ACK is sent
when a cut made behind it shows the generation. CUT's header key `dp: {plane: id}` is cumulative: the newest
spooled id of every plane. If no source answers, no cut is made, so that no coverage is claimed. SCHEMA
comes before REGISTER.

Limits: start, duration and `wall_us` below 2^53 us; HELLO 4 KiB; a CUT from an agent 1 MiB - 72 KiB (it
travels inside CUTS); 512 exports; 256 spool epochs.
"""
SERVER_NOTES = """\
A pair that restarts, and a pair that sees a new `inc`, posts GATEWAY (up) and STREAMS_SEEN again for every
session. `services`, when it restarts, posts LEASE with a new `inc`, answers the announcements with
SET_THRESHOLDS and waits for the cuts to confirm the caps in force; it never issues caps again merely
because it restarted. dbmanager appends every message it takes (CUTS, GATEWAY, STREAMS_SEEN, RECORD) to its
durable ingest queue before anything else.
"""
REQUESTS = """\
### Requests to services

| op | body | answer's body |
|---|---|---|
| `apply` | `documents: str, dry_run: bool, based_on: {name: version}, may_enforce: bool` | \
`applied: [{name, version, changed, line}], warnings: [str]` |
| `delete` | `name: str` | `{}` or 404 |
| `end_document` | `kind: str (no agreement), name: str` | `{}` or 404; 422 for one that is used |
| `notify_test` | `name: str` | `{event_id}` or 404 |
| `event_again` | `name: str (recipient)`, and of the event all but its details | `{event_id}` or 404 |
| `acknowledge` | `event_id, note, kind, subject: str` | `{event_id}` |
| `throttle_set` | `volume, client, duration_s, reason, force` and one rate | see below, or 409 |
| `throttle_release` | `volume, client, throttle_id: str \\| nil` | `released: [str]` or 404 |
| `mode` | `mode: "observe" \\| "enforce" \\| "inherit", backend: str \\| nil` | `{mode, backend}` |
| `policies_changed` | `{}` | `{version}` |
| `policy_pin` | `{version}`, or null to unpin | `{pinned}` |
| `policy_rollback` | `{version?}` | `{rolled_back}` |
| `gateway_list` | `address: str (IP:PORT), name: str, is_listed: bool` | the same |
| `volumes_approve` | `volumes: [str], gateways: [str]` | `approved: [DECIDED]`, or 404, 409 |
| `volumes_revoke` | `volumes: [str], gateways: [str]` | `revoked: [DECIDED]`, or 404, 409 |

`apply`: YAML, one document or several, at most 60,000 bytes and 200 documents (`sla apply` divides longer
files); it may also be answered 422 with `errors: [{line, field, problem, fix, document}]`. Without
`may_enforce` an agreement that would get `control: enforce` is such an error. `throttle_set`:
`volume: str`, `client: str | nil` (only this client of it), exactly one of `iops, bytes_per_s, cost_per_s`;
`duration_s: number | nil`, `reason: str`, `force: bool`. A rate below what an agreement promises for the
volume itself is refused with 409 unless `force`. Its answer: `throttle_id: str`, `breaks: [str]` (such
promises), `holds: str` (the rate that holds, if the floor lies above the one asked for).
Entries of `applied` that are no agreements have `kind` too, those of maintenance `agreements: int` in scope.
`policies_changed`: look for a new policy version now. `policy_pin`: keep a version, whatever is published.
`policy_rollback`: put the version before the one in force in force; 409 if `version` is not in force, or one
is pinned. `gateway_list`: dial this gateway, or no more.
`volumes_approve`, `volumes_revoke`: names or patterns of volumes, names or ids of gateways; without gateways
the one that is meant, 409 if that is not clear. DECIDED: `{volume, gateway, gateway_id, backend, owners}`,
the last are the names of all gateways that it belongs to then.
"""
SNAPSHOT = """\
### Live snapshot

- `at_us, mode`; `backend_modes`: `{backend: "observe" | "enforce"}` of those that have one of their own
- `gateways`: `[{gateway_id, name, state, address, last_cut_us, clock_offset_us, exports: int, streams: int,
  dropped_cuts: int, starved_ratio: float, io_waited_ratio: float | nil}]`; `starved_ratio` is the share of
  the newest cut in which its data plane was kept waiting for the processor of its host, `io_waited_ratio`
  that of the time since the cut before in which tasks of its host waited for I/O; nil if it is not known
- `volumes`: `[{volume, backend, iops, read_iops, write_iops, bytes_per_s, p50_us, p95_us, p99_us,
  service_p95_us, held, inflight, cap_cost_per_s, cap_ops_per_s, cap_bytes_per_s, cap_group: str, delay_us
  (mean), gateways: [str]}]` over the last 1 to 3 cuts (rates per second, percentiles are bucket upper edges);
  `cap_group`: the group whose cap it shares, or ""
- `slas`: `[{name, objective, metric, priority, state, reason: str, latency_us, threshold_us, percentile, u,
  excused_ratio: float, stall_us: int, failed_ratio: float, compliance: float | nil, coverage: float | nil,
  budget_remaining: float | nil, budget_minutes_left: float | nil, slices: {good, bad, no_data,
  not_applicable, excluded}, target, burn_1h: float | nil, alerts: [str], good_s, bad_s: int | nil}]`; states
  are `ok`, `at-risk`, `violating`, `no-data`, `idle`, `out-of-curve`, `not-applicable` and `excluded`
  (maintenance, service hours); `alerts` are the burn-rate pairs that are active; `good_s` and `bad_s` count
  what was judged so since services began, without late revisions; `reason` says why there is no data or
  nothing is promised; `excused_ratio` is the share of the I/Os that control leaves out, because the
  gateway's host was busy; `stall_us`: for how long nothing has completed though I/O is outstanding;
  `failed_ratio`: of I/Os that count as missed because they failed. Of indicators without a percentile
  `percentile` is nil, and there are `promised` (rates) and `measured`: a mean or a stall by the windows, a
  rate by the newest slice. Objectives left out of the live ones follow, at most 200, by their newest slice
- `throttles`: `[{throttle_id, volume, client, group_name: str, members: {volume: weight}, backend, source:
  "manual" | "control" | "policy", who: str, cost_per_s, ops_per_s, bytes_per_s, burst_s,
  peak_ops_per_s, reason: str (enum),
  text: str, victim: str, state, since_us, expires_us, late_ios: int, longest_hold_us, mean_hold_us,
  worst_hold_us: int, lifted_to: {cost_per_s, ops_per_s, bytes_per_s} | nil, floor: str}]`; `lifted_to`: the
  rates that hold in place of those asked for, as a floor (in words) lies above them; `client` is "" where
  the whole volume is capped, `volume` where a group is; mean and worst hold are of the last 1 to 3 cuts, the
  worst a bucket's upper edge; texts end after 400 characters
- `backends`: `[{backend, cost_per_s, cap_cost_per_s, phase: "idle" | "decrease" | "hold" | "increase",
  fault: "" | "hangs" | "fails", victims: [str]}]`; `victims`: the promises that its loop helps now by each of
  its throttles, at most 50
- `processes`: `[{name, state, restarts, since_us, pressure: {fullness, refused} | nil}]` (supervisor's
  RECORDs; newest PRESSURE)
- `problems`: `[{process, what, since_us, reason: str}]`: those of PRESSURE, the supervisor's as those of
  the part; dbmanager or supervisor without a report for 10 s; `what: "spool"`: an agent that drops cuts, by
  its name; `what: "events"`: events that cannot be shown
- `totals`: `{gateways: {state: int}, volumes: int, slas: {state: int}, throttles: int, backends: int}`; a
  list above holds at most `services.live_rows` of them: gateways that are lost, capped volumes and those
  that use most, promises that are violated or at risk, active backends first
- `policy_stage`: `{stage: "observe" | "enforce", stages: {backend: stage}, would_hold: [{volume, backend,
  cap_cost_per_s, cost_per_s, above_s, above_cost, watched_s}]}`: volumes above caps of the policy that are
  only observed: for how long, and by how much in all, since the version is in force
- `feed_forward`: `{watched, recurring, off: int}`: backends watched for bursts that recur, with a clear
  pattern, and switched off by evidence; counters since services began: `looks`, `clear` (patterns found),
  `expected`, `came`, `missed`, `ahead` (bursts with caps set before them), `left_alone`, `bad_ahead`,
  `bad_alone` (bad windows of them), `switched_off`, `discarded` (times that evidence was discarded); metrics
  have them as `sla_feed_forward_*`
- `others`: `[[name, objective, state, compliance, coverage, budget_remaining, budget_minutes_left, target,
  burn_1h, alerts, good_s, bad_s]]` of promises without a row in `slas`, at most 1,000 a snapshot: where there
  are more they take turns. Absent from servers of before; the application server keeps them for `GET /slas`
  and its metrics, and sends them to no page
- `cut_short`: `{list: rows left out}` where the view exceeded a frame
- `events`: the newest 20; `policy`: `{version, applied_us, pinned: bool} | nil`; `database`: why SQL cannot
  be read, empty while it can
"""

ROUTES = {
    Kind.HELLO: "agent",
    Kind.REGISTER: "agent",
    Kind.STREAMS: "agent",
    Kind.CUT: "agent",
    Kind.REPLY: "agent",
    Kind.CAPS_ACK: "agent",
    Kind.THRESHOLDS_ACK: "agent",
    Kind.ALERT: "agent",
    Kind.CA_QUERY: "agent",
    Kind.ENROL: "agent",
    Kind.RENEW: "agent",
    Kind.SPACE: "agent",
    Kind.SCHEMA: "agent",
    Kind.WELCOME: "PMDaemon",
    Kind.REGISTERED: "PMDaemon",
    Kind.POLL: "PMDaemon",
    Kind.CAPS: "PMDaemon",
    Kind.THRESHOLDS: "PMDaemon",
    Kind.COSTS: "PMDaemon",
    Kind.CA_CERT: "PMDaemon",
    Kind.CERTIFICATE: "PMDaemon",
    Kind.UNSUPPORTED: "agent, PMDaemon",
    Kind.ERROR: "agent, PMDaemon",
    Kind.BYE: "agent, PMDaemon",
    Kind.CUTS: "pair to services, dbmanager",
    Kind.GATEWAY: "pair to services, dbmanager",
    Kind.STREAMS_SEEN: "pair to services, dbmanager",
    Kind.CAPS_STATE: "pair to services",
    Kind.GATEWAY_ALERT: "pair to services",
    Kind.GATEWAY_SPACE: "pair to services",
    Kind.PRESSURE: "pair, dbmanager, supervisor to services; dbmanager, supervisor to appserver",
    Kind.SET_CAPS: "services to pair",
    Kind.SET_THRESHOLDS: "services to pair",
    Kind.SET_COSTS: "services to pair",
    Kind.LEASE: "services to pair",
    Kind.WATERMARKS: "dbmanager to pair",
    Kind.DURABLE: "dbmanager to pair",
    Kind.RECORD: "any process to dbmanager",
    Kind.RECORDED: "dbmanager to the sender",
    Kind.REQUEST: "appserver to services",
    Kind.RESPONSE: "services to appserver",
    Kind.SNAPSHOT: "services to appserver",
    Kind.DP_HELLO: "plane",
    Kind.DP_COLLECT: "link",
    Kind.DP_CUT: "plane",
    Kind.DP_CAPS: "link",
    Kind.DP_THRESHOLDS: "link",
    Kind.DP_COSTS: "link",
    Kind.DP_LEASE: "link",
    Kind.DP_STATUS: "another program of the host",
    Kind.DP_REPORT: "plane",
    Kind.DP_TAKE_OVER: "the plane's next process",
    Kind.DP_HAND_OVER: "plane",
    Kind.DP_TAKEN: "the plane's next process",
    Kind.MIRROR_HELLO: "origin",
    Kind.MIRROR_WELCOME: "keeper",
    Kind.MIRROR_EVENTS: "origin",
    Kind.MIRROR_KEPT: "keeper",
    Kind.MIRROR_CONFIRMED: "origin",
    Kind.MIRROR_DELIVERED: "keeper",
    Kind.MIRROR_BEAT: "origin, keeper",
}


def messages_of(module: ModuleType) -> Iterator[type[WireMessage]]:
    """The message classes that a module defines, in its order."""
    for item in vars(module).values():
        if inspect.isclass(item) and issubclass(item, WireMessage) and item.__module__ == module.__name__:
            yield item


def markdown(docstring: str | None) -> str:
    """A docstring's paragraphs as Markdown, filled again for a page."""
    text = inspect.cleandoc(docstring or "").replace("``", "`")
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(textwrap.fill(part, COLUMNS, break_on_hyphens=False) for part in paragraphs)


def header_of(message: type[WireMessage]) -> str:
    """Keys and types of a header as a block of code; keys in a row that share a type name it once."""
    shown: list[Key] = []
    for item in fields_of(message):
        if shown and len(item.key.form) < 6 and shown[-1].form == item.key.form:
            shown[-1] = shown[-1]._replace(form="")
        shown.append(item.key)
    parts = [f"{key.name}{'?' * key.is_optional}" + (f": {key.form}" if key.form else "") for key in shown]
    text = textwrap.fill(", ".join(parts) or "{}", COLUMNS - 4, break_on_hyphens=False)
    return f"```text\n{text}\n```"


def entry(message: type[WireMessage]) -> str:
    """The section of one message."""
    kind = message.KIND
    return (
        f"### {kind.name} ({kind:d}), {ROUTES[kind]}\n\n{header_of(message)}\n\n{markdown(message.__doc__)}\n"
    )


def cut_entry() -> str:
    """CUT has an encoder of its own; its module says what is in it."""
    text = re.sub(r"``", "`", inspect.cleandoc(cut.__doc__ or ""))
    first, rest = text.split("Header keys:", 1)
    keys, rest = rest.split("Blob, little-endian:", 1)
    blob, notes = rest.split("A missed entry", 1)
    title = f"### CUT ({Kind.CUT:d}), {ROUTES[Kind.CUT]}"
    columns = ["blob, little-endian:", blob.strip("\n").rstrip()]
    code = "\n".join(["```text", keys.strip("\n").rstrip(), "", *columns, "```"])
    return "\n\n".join([title, code, markdown(first), markdown("A missed entry" + notes)]) + "\n"


def session_table() -> str:
    """What each side may send in which state."""
    names = {
        (state, who): [kind.name for each, side, kind in TABLE if (each, side) == (state, who)]
        for state in (
            SessionState.CONNECTED,
            SessionState.AUTHENTICATED,
            SessionState.REGISTERED,
            SessionState.POLLING,
        )
        for who in Side
    }
    always = set.intersection(*map(set, names.values()))
    rows = ["| state | side | may send |", "|---|---|---|"]
    for (state, who), kinds in names.items():
        before = set(names[SessionState.REGISTERED, who]) if state is SessionState.POLLING else set()
        new = [name for name in kinds if name not in before | always]
        said = ", ".join((["as registered"] if before else []) + new)
        rows.append(f"| {state.value} | {who.value} | {said} |")
    rows.append(f"| any of these | both | {', '.join(sorted(always))} |")
    return "\n".join(rows) + "\n"


def channel_entry(op: str, message: type[channel_messages.Sent]) -> str:
    """The section of a message on the channel between the daemon's parent and a pair."""
    hints = get_type_hints(message)
    text = ", ".join(f"{item.name}: {form_of(hints[item.name])}" for item in fields(message))
    code = textwrap.fill(text, COLUMNS - 4, break_on_hyphens=False)
    return f"### {op}\n\n```text\n{code}\n```\n\n{markdown(message.__doc__)}\n"


def intro(title: str, module: ModuleType) -> str:
    """The heading of a conversation, and what its module says of it."""
    text = markdown(module.__doc__).split("\n\nSource:")[0].removesuffix("Pure.").rstrip()
    return f"## {title}\n\n{text}\n"


def render() -> str:
    """The whole page."""
    told = [message for module in OF_AGENT for message in messages_of(module)]
    of_agent = [entry(message) for message in told if message.KIND < OWN_KINDS]
    passed_on = [entry(message) for message in told if message.KIND >= OWN_KINDS]
    of_agent.insert(next(at for at, text in enumerate(of_agent) if text.startswith("### REPLY")), cut_entry())
    parts = [HEAD, AGENT, session_table(), *of_agent, AGENT_NOTES]
    parts += [intro("Between the server's processes", server)]
    parts += [entry(message) for module in (server, orders) for message in messages_of(module)]
    parts += [*passed_on, SERVER_NOTES]
    parts += [intro("Between the daemon's parent and its pairs", channel_messages)]
    parts += [channel_entry(op, message) for op, message in channel_messages.OPS.items()]
    parts += [intro("Between the application server and services", api), *map(entry, messages_of(api))]
    parts += [REQUESTS, SNAPSHOT]
    parts += [intro("Between the agent's link and its data planes", planes)]
    parts += [entry(message) for module in (planes, plane_report) for message in messages_of(module)]
    parts += [intro("Between two cooperating servers", mirror), *map(entry, messages_of(mirror))]
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(render())
