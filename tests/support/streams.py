"""A stream of the data plane, driven in milliseconds, and what happened to each of its requests."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gateway_agent.nbd.accounting import FAILED_BIT, REFUSED_BIT, StreamAccount, word_of
from gateway_agent.nbd.client_pause import ClientPause
from gateway_agent.nbd.limits import KIND_READ, KIND_WRITE, Entry
from pmdaemon.wire.cut import IO_ANY, IO_READ, IO_WRITE
from pmdaemon.wire.messages.plane_sets import Limit

MS = 1_000_000
IO_OF = {IO_ANY: (KIND_READ, KIND_WRITE), IO_READ: (KIND_READ,), IO_WRITE: (KIND_WRITE,)}
_OUTCOMES = {"done": 0, "failed": FAILED_BIT, "refused": FAILED_BIT | REFUSED_BIT}


class Session:
    """One client: its requests by number, held ones apart, and when it took no answers."""

    def __init__(self, now_ns: int) -> None:
        self.pending: dict[int, tuple[int, int]] = {}  # (arrival as of the last cut, kind)
        self.held: dict[int, tuple[int, int]] = {}
        self.pause = ClientPause()
        self.pauses: list[list[int]] = []  # [begin, end], all of them
        self.cut_ns = now_ns

    def gauges(self) -> tuple[int, int]:
        return len(self.pending), len(self.held)

    def outstanding(self, now_ns: int) -> list[tuple[int, int, int]]:
        paused_ns = self.pause.total_ns(now_ns)
        found = [(arrived_ns + paused_ns, kind, paused_ns) for arrived_ns, kind in self.pending.values()]
        return found + [(arrived_ns, kind, 0) for arrived_ns, kind in self.held.values()]

    def cut_ended(self, now_ns: int) -> None:
        paused_ns, self.cut_ns = self.pause.total_ns(now_ns), now_ns
        self.pause.cut_ended(now_ns)
        for number, (arrived_ns, kind) in self.pending.items():
            self.pending[number] = arrived_ns + paused_ns, kind

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


class History:
    """One stream, driven in milliseconds; and what happened to every request, for a model."""

    def __init__(self, sessions: int = 2, limits: tuple[Limit, ...] = ()) -> None:
        self.stream = StreamAccount(0, "vol-1", "host-a", "disk")
        self.now_ns = 5 * MS
        self.sessions: list[Session] = []
        self.requests: list[dict[str, Any]] = []  # how: done, failed, refused, left or None
        self.events: list[tuple[int, str, Any]] = []  # (when, what, number or session)
        self.cuts: list[list[Entry]] = []  # entries of each
        self.ends: list[int] = []
        self.in_force: list[tuple[Limit, ...]] = []  # limits in each cut
        self.limits: tuple[Limit, ...] = ()
        self.set_limits(limits)
        for _ in range(sessions):
            self.connect()

    def connect(self) -> None:
        self.sessions.append(Session(self.now_ns))
        self.stream.sessions.append(self.sessions[-1])

    def pass_ms(self, ms: float) -> None:
        self.now_ns += round(ms * MS)

    def _happened(self, what: str, about: Any = None) -> None:
        self.events.append((self.now_ns, what, about))

    def arrive(self, kind: int = KIND_READ, session: int = 0, *, held: bool = False) -> int:
        number, of = len(self.requests), self.sessions[session]
        times = {"arrived": self.now_ns, "went": None, "ended": None}
        self.requests.append({"kind": kind, "how": None, "session": of, **times})
        self.stream.arrived += kind in (KIND_READ, KIND_WRITE)
        of.held[number] = self.now_ns, kind
        self._happened("arrive", number)
        if not held:
            self.let_through(number)
        return number

    def let_through(self, number: int) -> None:
        """As ``NbdSession.admit_head`` does."""
        session = self.requests[number]["session"]
        arrived_ns, kind = session.held.pop(number)
        paused_ns = session.pause.total_ns(self.now_ns)
        if paused_ns and arrived_ns - paused_ns < session.cut_ns:
            self.stream.let_through(kind, arrived_ns, paused_ns)
        session.pending[number] = arrived_ns - paused_ns, kind
        self.requests[number]["went"] = self.now_ns

    def take_answers(self, session: int, does_take: bool) -> None:
        """The client of a session takes its answers, or does not."""
        of = self.sessions[session]
        if does_take and of.pause.is_on:
            of.pause.end(self.now_ns)
            of.pauses[-1][1] = self.now_ns
        elif not does_take and not of.pause.is_on:
            of.pause.begin(self.now_ns)
            of.pauses.append([self.now_ns, 1 << 62])

    def complete(self, number: int, how: str = "done") -> None:
        session = self.requests[number]["session"]
        arrived_ns, kind = session.pending.pop(number)
        finished = (
            session.pause.total_ns(self.now_ns),
            word_of(kind, 512, False) | _OUTCOMES[how],
            arrived_ns,
            arrived_ns,
            self.now_ns,
        )
        self.stream.record([*finished], self.now_ns)
        self.requests[number] |= {"ended": self.now_ns, "how": how}
        self._happened(how, number)

    def leave(self, session: int) -> None:
        gone = self.sessions[session]
        for number in (*gone.pending, *gone.held):
            self.requests[number] |= {"ended": self.now_ns, "how": "left"}
        self.stream.leave(gone, self.now_ns)
        self._happened("left", gone)
        self.sessions[session] = Session(self.now_ns)
        self.stream.sessions.append(self.sessions[session])

    def refuse(self) -> None:
        """A client that comes is refused, because the storage is not there."""
        self.stream.connection_refused(self.now_ns, self.now_ns)
        self._happened("refuse")

    def let_in(self) -> None:
        """A client that comes finds its storage there."""
        self.stream.connection_made(self.now_ns)
        self._happened("found")

    def cut(self) -> list[Entry]:
        taken = self.stream.take(self.now_ns)
        self.cuts.append(taken.missed if taken is not None else [])
        self.ends.append(self.now_ns)
        self.in_force.append(self.limits)
        self._happened("cut")
        return self.cuts[-1]

    def set_limits(self, limits: tuple[Limit, ...]) -> None:
        self.limits = tuple(limits)
        self.stream.set_limits(self.limits, self.now_ns)

    def sums(self) -> dict[tuple[int, int], list[int]]:
        """By entry kind, io and threshold: the sums of both figures over all cuts."""
        found: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        for entries in self.cuts:
            for io, threshold_us, counted, missed in entries:
                found[io, threshold_us][0] += counted
                found[io, threshold_us][1] += missed
        return found

    def age_ns(self, request: dict[str, Any], at_ns: int) -> int:
        """How old a request is, or was at its end: its client's pauses since it was let through left out."""
        if request["ended"] is not None:
            at_ns = min(at_ns, request["ended"])
        went_ns = 1 << 62 if request["went"] is None else request["went"]
        paused_ns = sum(
            max(0, min(end_ns, at_ns) - max(begin_ns, went_ns))
            for begin_ns, end_ns in request["session"].pauses
        )
        return int(at_ns - request["arrived"] - paused_ns)

    def play(self, steps: list[tuple[str, Any, Any]], tick_ns: int) -> None:
        """Do what each step says, ``tick_ns`` apart; then a cut. Steps that make no sense are left out."""
        for what, one, two in steps:
            self.now_ns += tick_ns
            self._step(what, one, two)
        self.pass_ms(1)
        self.cut()

    def _step(self, what: str, one: Any, two: Any) -> None:
        sent = [number for session in self.sessions for number in session.pending]
        held = [number for session in self.sessions for number in session.held]
        if what in ("arrive", "hold"):
            self.arrive(one, two, held=what == "hold")
        elif what == "go" and held:
            self.let_through(held[one % len(held)])
        elif what == "complete" and sent:
            self.complete(sent[one % len(sent)], two)
        elif what == "take":
            self.take_answers(one, two)
        elif what == "pass":
            self.pass_ms(one)
        elif what == "limits":
            self.cut()
            self.set_limits(tuple(sorted(one)))
        elif what == "leave":
            self.leave(one)
        elif what in ("cut", "refuse", "found", "fold"):
            {"cut": self.cut, "refuse": self.refuse, "found": self.let_in, "fold": self.stream.fold}[what]()
