"""Figures of the daemon about itself: Prometheus text (P9..P16), and back-pressure for ``services``.

Pairs send their figures to the parent each second; the parent writes all of them, with its own, to one file
in the runtime directory, aside and renamed: a reader sees a whole second or the one before. Any number of
processes, no shared memory, nothing left to clean up after a crash; a file that has not been written for
long says that the daemon is gone. The application server adds every such file to its ``/metrics``
(``sla_server.api.metrics``).

A figure that is not declared here is not shown; one that a pair does not send is 0: it has not happened.

``BackpressureReporter`` reports to ``services`` every other second how full is what a process writes to,
and its problems (PRESSURE). Best effort: without room the report is not sent, and the next one says the
same.

Source: P11 (T_ptmax), P16; the text format of Prometheus, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pmdaemon.mailbox.errors import MailboxError
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import write_whole
from pmdaemon.wire.messages.server import PRESSURE_PERIOD_NS, Pressure, Problem

if TYPE_CHECKING:
    from pmdaemon.mailbox import Mailbox
    from pmdaemon.poller.children import PairChild
    from pmdaemon.poller.parent import PairManager

PREFIX: Final = "sla_pmdaemon_"
SERVICES = "services"


class Declared(NamedTuple):
    """One figure: the name it has in a pair's report, its Prometheus name, type and meaning."""

    key: str
    name: str
    type: str
    about: str


PAIR: Final = (
    Declared("polls", "polls_total", "counter", "Polls sent to gateways."),
    Declared("replies", "replies_total", "counter", "Replies received, the end of an answer each."),
    Declared(
        "late_replies", "late_replies_total", "counter", "Replies that came after the next poll was due."
    ),
    Declared("polls_skipped", "polls_skipped_total", "counter", "Polls not sent because an answer was due."),
    Declared(
        "polls_spared",
        "polls_spared_total",
        "counter",
        "Polls not sent because there was no room for an answer.",
    ),
    Declared("missed_ticks", "overruns_total", "counter", "Polls that fell due while the pair did not run."),
    Declared("cuts", "cuts_total", "counter", "Cuts received."),
    Declared("received_bytes", "received_bytes_total", "counter", "Bytes received from gateways."),
    Declared("sent_bytes", "sent_bytes_total", "counter", "Bytes of requests given to sockets."),
    Declared("writes", "writes_total", "counter", "Writes to gateways; several frames leave as one."),
    Declared("posted_cuts", "posted_cuts_total", "counter", "Cuts posted to the database manager."),
    Declared("posted_bytes", "posted_bytes_total", "counter", "Bytes of cuts given to the mailbox."),
    Declared(
        "refused_keeping", "mailbox_refused_total", "counter", "Batches the database manager had no room for."
    ),
    Declared(
        "dropped_live_cuts",
        "dropped_live_cuts_total",
        "counter",
        "Cuts replaced by their gateway's next before services had room.",
    ),
    Declared("rewinds", "rewinds_total", "counter", "Times a gateway's position was set back."),
    Declared(
        "connections", "connections_total", "counter", "Connections accepted, those moved here among them."
    ),
    Declared("registrations", "registrations_total", "counter", "Sessions registered."),
    Declared(
        "refused_sessions", "refused_sessions_total", "counter", "Sessions ended because of what was sent."
    ),
    Declared(
        "doomed_connections", "overflowed_total", "counter", "Connections ended: unread output, failed sends."
    ),
    Declared("stalls", "stalls_total", "counter", "Polls not answered in time."),
    Declared(
        "superseded_sessions",
        "superseded_total",
        "counter",
        "Sessions ended by a newer one of the same gateway.",
    ),
    Declared("moved_out", "moved_out_total", "counter", "New connections given to another pair."),
    Declared("moved_in", "moved_in_total", "counter", "New connections taken from another pair."),
    Declared(
        "moves_by_reconnect",
        "moves_by_reconnect_total",
        "counter",
        "Sessions ended so that the agent dials again elsewhere.",
    ),
    Declared(
        "mail_passed_on",
        "mail_passed_on_total",
        "counter",
        "Messages passed on to the pair that has the shard.",
    ),
    Declared(
        "mail_not_passed_on",
        "mail_not_passed_on_total",
        "counter",
        "Messages and connections for another pair that were dropped for want of a descriptor.",
    ),
    Declared(
        "mail_dropped", "mail_dropped_total", "counter", "Messages that were passed on and found no owner."
    ),
    Declared(
        "cpu_seconds", "cpu_seconds_total", "counter", "CPU time of the pair; by polls it is CPU a poll."
    ),
    Declared("cpu_seconds_a_poll", "cpu_seconds_a_poll", "gauge", "CPU time by polls sent, last second."),
    Declared("tls_handshakes", "tls_handshakes_total", "counter", "TLS handshakes that succeeded."),
    Declared("certificates_issued", "certificates_issued_total", "counter", "Enrolments and renewals."),
    Declared(
        "strangers_evicted", "strangers_evicted_total", "counter", "Ended because others waited to register."
    ),
    Declared(
        "strangers_turned_away", "strangers_turned_away_total", "counter", "Not taken: too many unregistered."
    ),
    Declared(
        "lost_sessions", "lost_sessions_total", "counter", "Sessions that ended and not by our own stop."
    ),
    Declared(
        "bad_parcels", "bad_parcels_total", "counter", "Not taken over: out of descriptors, or not readable."
    ),
    Declared(
        "connection_faults", "connection_faults_total", "counter", "Connections closed for a fault of ours."
    ),
    Declared("over_limit", "over_limit_total", "counter", "Refused or dropped: above a gateway's quota."),
    Declared(
        "dropped_readings",
        "dropped_readings_total",
        "counter",
        "Space of pools dropped: no room at services.",
    ),
    Declared("connections_open", "connections_open", "gauge", "Connections open, registered or not."),
    Declared("gateways_up", "gateways_up", "gauge", "Gateways with a session that answers."),
    Declared(
        "gateways_stalled", "gateways_stalled", "gauge", "Gateways with a session that does not answer."
    ),
    Declared("gateways_lost", "gateways_lost", "gauge", "Gateways known here without a session."),
    Declared(
        "t_ptmax_seconds", "t_ptmax_seconds", "gauge", "Longest processing time of one message, fading."
    ),
    Declared("shards", "shards", "gauge", "Shards this pair has, of 256."),
    Declared(
        "mailbox_posts", "mailbox_posts_total", "counter", "Messages posted, a copy for each recipient."
    ),
    Declared(
        "mailbox_full", "mailbox_full_total", "counter", "Copies refused for want of room in the mailbox."
    ),
    Declared("mailbox_takes", "mailbox_takes_total", "counter", "Messages taken from the mailbox."),
    Declared("mailbox_fill_ratio", "mailbox_fill_ratio", "gauge", "Fullest route of the pair, 0 to 1."),
    Declared("resident_bytes", "resident_bytes_max", "gauge", "Largest resident memory of the pair so far."),
)
REFUSALS: Final = Declared(
    "refusal_", "refusals_total", "counter", "Peers refused, by the code that they were sent and the log has."
)
PARENT: Final = (
    Declared("pairs", "pairs", "gauge", "Pairs that run."),
    Declared("pairs_needed", "pairs_needed", "gauge", "Pairs by the formula, before the configured limit."),
    Declared("restarts", "pair_restarts_total", "counter", "Times a pair was started again."),
    Declared("moves", "shards_moved_total", "counter", "Shards that have changed their pair."),
    Declared("passed_on", "passed_on_total", "counter", "Sessions and messages passed from pair to pair."),
    Declared("lost", "not_passed_on_total", "counter", "Those for which no pair was running."),
    Declared("refused", "refused_connections_total", "counter", "Connections that no pair could take."),
    Declared("listed", "listed_gateways", "gauge", "Gateways listed to be dialled."),
    Declared("dialled", "dialled_gateways", "gauge", "Those of them whose connection a pair has."),
)


def text(pair_manager: PairManager, refused_connections: int, *, listed: int = 0, dialled: int = 0) -> str:
    """All figures."""
    children = pair_manager.children
    parent = {
        "pairs": sum(child.is_running for child in children),
        "pairs_needed": pair_manager.needed,
        "restarts": sum(max(child.restarts, 0) for child in children),
        "moves": pair_manager.moves,
        "passed_on": pair_manager.passed_on,
        "lost": pair_manager.lost,
        "refused": refused_connections,
        "listed": listed,
        "dialled": dialled,
    }
    lines = [line for item in PARENT for line in _lines(item, [("", float(parent[item.key]))])]
    for item in PAIR:
        lines += _lines(item, _samples(item.key, children))
    lines += _lines(REFUSALS, _refusals(children))
    return "\n".join(lines) + "\n"


def _samples(key: str, children: Iterable[PairChild]) -> list[tuple[str, float]]:
    reports: list[tuple[int, Mapping[str, float]]] = [(child.index, child.last.metrics) for child in children]
    return [(f'{{pair="{index}"}}', metrics.get(key, 0.0)) for index, metrics in reports if metrics]


def _refusals(children: Iterable[PairChild]) -> list[tuple[str, float]]:
    found = []
    for child in children:
        for key, value in sorted(child.last.metrics.items()):
            if key.startswith(REFUSALS.key):
                code = key.removeprefix(REFUSALS.key).replace("_", "-")
                found.append((f'{{pair="{child.index}",code="{code}"}}', value))
    return found


def _lines(item: Declared, samples: list[tuple[str, float]]) -> list[str]:
    if not samples:
        return []
    name = PREFIX + item.name
    head = [f"# HELP {name} {item.about}", f"# TYPE {name} {item.type}"]
    return head + [f"{name}{labels} {value:.10g}" for labels, value in samples]


def write(path: Path, content: str) -> None:
    """Replace the file, whole."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, content)


class BackpressureReporter:
    """See the module's text.

    Args:
        mailbox: where it posts, and whose rings it reports.
        fullness: shares in use beside those of the rings.
        refused: counters beside the mailbox's own.
        problems: what the process cannot use just now.
        copies: further mailboxes, with the recipient there.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        clock: Clock,
        fullness: Callable[[], Mapping[str, float]],
        refused: Callable[[], Mapping[str, int]],
        problems: Callable[[], Sequence[Problem]] = tuple,
        copies: Sequence[tuple[Mailbox, str]] = (),
    ) -> None:
        self._mailbox = mailbox
        self._clock = clock
        self._fullness = fullness
        self._refused = refused
        self._problems = problems
        self._recipients = ((mailbox, SERVICES), *copies)
        self._due_ns = 0

    def tick(self) -> None:
        """Report if it is time."""
        if self._clock.monotonic_ns() >= self._due_ns:
            self.report()

    def report(self) -> None:
        """Report now."""
        self._due_ns = self._clock.monotonic_ns() + PRESSURE_PERIOD_NS
        stats = self._mailbox.stats()
        fullness = {**stats["ring_fill_ratio"], **self._fullness()}
        refused = {"posts": stats["full"], **self._refused()}
        now_us, problems = self._clock.unix_us(), self._problems()
        frame = Pressure(self._mailbox.name, now_us, fullness, refused, tuple(problems)).encode()
        for mailbox, recipient in self._recipients:
            with suppress(MailboxError):  # full, or a segment without that route
                mailbox.post(recipient, frame)
