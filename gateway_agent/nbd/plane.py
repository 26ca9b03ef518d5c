"""A data-plane process ``nbd-N``: ``python -m gateway_agent.nbd.plane --config FILE --plane nbd-0``.

    start   read the configuration, open files, listen (clients, control socket), ask upstreams for sizes
    serve   one epoll loop in the main thread: clients, upstreams, link, timers (see ``loop``)
    SIGHUP  take another part of the configuration (``part``); no client of an export that stays is touched,
            unless it would not be let in any more. A part without exports says that this plane is removed: it
            lets its clients go, and stops
    upgrade another process takes over the listening sockets (``takeover``): this one keeps its clients until
            they go, ends their connections after ``drain_s`` or at another part (SIGHUP), hands its last
            counts to the link, and stops
    stop    SIGTERM, SIGINT or the parent's end: close the clients, which repeat what was under way; wait for
            the link, if it is there, to spool the last counts (2 s at most); close the rest

It knows no server and no disk queue. The link process may die, be reloaded or upgraded meanwhile.
"""

from __future__ import annotations

from pmdaemon.runtime import lean_structlog  # noqa: F401 - before structlog: see there

# isort: split
import contextlib
import os
import socket
from functools import partial
from pathlib import Path
from typing import Final

import click
import structlog

from gateway_agent.config import PlaneConfig, load_agent
from gateway_agent.host_config import UNIX_PATH_BYTES
from gateway_agent.nbd.buffers import MemoryBudget
from gateway_agent.nbd.caps import CapsInForce, configured_caps
from gateway_agent.nbd.control import ControlServer
from gateway_agent.nbd.cuts import CutMaker, RunDelay, StreamTable
from gateway_agent.nbd.exports import BURST_NS, ExportTable, FittedCost
from gateway_agent.nbd.groups import GroupTable
from gateway_agent.nbd.last_counts import hand_over_counts
from gateway_agent.nbd.listeners import ListenerGuard
from gateway_agent.nbd.loop import IN, EventLoop
from gateway_agent.nbd.negotiation import Negotiation, NegotiationTable, identity_of
from gateway_agent.nbd.part import PlanePart
from gateway_agent.nbd.report import plane_report
from gateway_agent.nbd.sockets import (
    Address,
    bound_address,
    listen_at,
    parse_listen,
    prepare,
    unlink_own,
)
from gateway_agent.nbd.takeover import MOST_SOCKETS, FormerProcesses, Inheritance, former_sockets, take_over
from gateway_agent.nbd.tls import TlsEngine
from gateway_agent.nbd.volume import PlaneContext
from pmdaemon.errors import ConfigError, WireError
from pmdaemon.runtime import logs
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.failures import failure_recorded, outermost
from pmdaemon.runtime.hangup import Hangup
from pmdaemon.runtime.open_files import raise_open_files
from pmdaemon.runtime.sockets import accept
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire.messages.costs import Costs
from pmdaemon.wire.messages.plane_report import HandedOver, PlaneReport
from pmdaemon.wire.messages.plane_sets import PlaneCaps, PlaneThresholds
from pmdaemon.wire.messages.planes import DpHandOver, DpHello

log = structlog.get_logger("plane")
SCRATCH_BYTES: Final = (1 << 20) + 4096  # the largest receive, a header before it
OPEN_FILES: Final = 65_536  # a client takes one, or more before an upstream; a volume two for its file
MAX_ACCEPTS: Final = 16  # at a time, so that a crowd of new clients does not hold up those that work
CLIENT_MODE: Final = 0o660  # of Unix sockets for clients
CONTROL_MODE: Final = 0o600
LISTEN_AGAIN_NS: Final = 10**9  # an address that another plane has not let go of yet
REMOVED_CHECK_NS: Final = 100_000_000
LEAVING_CHECK_NS: Final = 100_000_000
MOST_PROBLEMS: Final = 8  # in a hello, which has little room beside its exports
MOST_CHARACTERS: Final = 256


class Plane:
    """One data plane; also the ``LinkCommands`` of its control socket.

    Args:
        config: of this plane.
        clock: for tests.
        inherited: what a former process of this plane hands over; the caller confirms it.

    Raises:
        ConfigError: an address that cannot be listened on.
        BadCaps: the former process's orders are not well-formed.
    """

    def __init__(
        self, config: PlaneConfig, clock: Clock | None = None, inherited: Inheritance | None = None
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._loop = EventLoop(self._clock)
        self._run_delay = RunDelay()
        cuts = CutMaker(
            StreamTable(), self._clock.monotonic_ns(), self._clock.unix_us(), self._run_delay.total_us
        )
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        memory = MemoryBudget(self._loop), MemoryBudget(self._loop)
        self._tls_engine = TlsEngine(self._loop)
        since_ns = self._clock.monotonic_ns() if inherited is not None else None
        context = PlaneContext(self._loop, self._clock, cuts, scratch, *memory, self._tls_engine, since_ns)
        self._context = context
        self._other = context.other
        path = config.control_socket
        self._former = FormerProcesses(self._loop, path, context, inherited, self._enforce)
        self._cuts = cuts
        self._caps = CapsInForce(*configured_caps(config))
        self._exports = ExportTable(config, context, self._on_learned)
        self._groups = GroupTable(self._loop, BURST_NS, since_ns)
        self._guard = ListenerGuard(
            config.plane, config.security, self._loop, self._tls_engine, self._on_lists
        )
        self._negotiations = NegotiationTable(self._guard)
        self._is_stopping = False
        self._stop: Stop | None = None
        self._part: PlanePart | None = None
        self._problems: dict[str, str] = {}  # of the newest part, by what it is about
        self._name = config.plane
        self._next_control: socket.socket | None = None  # while another process takes over
        self._drain_at_ns: int | None = None  # another one has taken over
        self._thresholds: PlaneThresholds | None = None
        self._costs: Costs | None = None
        self._listeners: dict[str, socket.socket] = {}
        self._socket_gid = config.security.socket_gid(config.plane)
        if inherited is not None:
            self._succeed(inherited)
        for text in config.listen:
            if text not in self._listeners:
                self._listen(text)
        self._control_address = Address(path=config.control_socket)
        control = inherited.control if inherited is not None else None
        self._control = ControlServer(
            self._loop, control or listen_at(self._control_address, CONTROL_MODE), self
        )
        self._enforce(self._clock.monotonic_ns())
        for volume in self._exports.volumes.values():
            self._exports.ask(volume)

    @property
    def listening(self) -> list[Address]:
        """Where clients can connect."""
        return [bound_address(sock) for sock in self._listeners.values()]

    def run(self, stop: Stop, part: PlanePart | None = None, hangup: Hangup | None = None) -> None:
        """Serve until the stop is asked for; take ``part`` again whenever ``hangup`` says so."""
        self._stop, self._part = stop, part
        if part is not None and hangup is not None:
            self._loop.watch(hangup.fileno(), IN, lambda _events: self._on_hangup(part, hangup), _ignore)
        log.info(
            "serving", listening=[str(address) for address in self.listening], volumes=self._exports.names
        )
        self._loop.run(stop)
        log.info("stopping", reason=stop.reason)
        self._end_clients()
        if not self._is_stopping:
            self._finish_counts(self._clock.monotonic_ns())
            hand_over_counts(self._loop, self._control, self._cuts, self._context.farewells)

    def _finish_counts(self, now_ns: int) -> None:
        self._is_stopping = True
        self._cuts.finish(now_ns, self._clock.unix_us())
        self._control.send_hello()

    def step(self) -> None:
        """One turn of the loop, for tests."""
        self._loop.step()

    # -- another process takes over -------------------------------------------------------------------------

    def _succeed(self, former: Inheritance) -> None:
        """Begin where a former process of this plane is."""
        now_ns = self._clock.monotonic_ns()
        if former.caps is not None and former.lease_end_ns is not None:
            self._caps.inherit(former.caps, former.lease_end_ns, now_ns)
        if former.costs is not None:
            self.costs(Costs.parse(former.costs))
        if former.thresholds is not None:
            self._thresholds = PlaneThresholds.parse(former.thresholds)
        self._cuts.succeed(former.start_ns, former.start_us, self._thresholds, self._caps.generation)
        for text in self._config.listen:
            if text in former.listeners:
                self._watch(text, former.listeners.pop(text))

    def offer(self) -> tuple[bytes, list[socket.socket]] | None:
        """See ``control.LinkCommands``."""
        path = self._path_as(f"{self._config.plane}.{os.getpid()}")
        if self._drain_at_ns is not None or self._is_stopping or len(self._listeners) >= MOST_SOCKETS:
            return None
        if len(path.encode()) > UNIX_PATH_BYTES:
            log.error("cannot-hand-over", control=path, problem="it is too long; shorten runtime_dir")
            return None
        caps, lease_end_ns = self._caps.in_words
        offered = DpHandOver(
            list(self._listeners),
            caps,
            lease_end_ns,
            self._thresholds.said if self._thresholds is not None else None,
            *self._cuts.start,
            self._costs.header() if self._costs is not None else None,
        )
        try:
            data = offered.encode()
            self._next_control = listen_at(Address(path=self._path_as(str(os.getpid()))), CONTROL_MODE)
        except (ConfigError, WireError) as exc:
            log.error("cannot-hand-over", problem=str(exc))
            return None
        for sock in self._listeners.values():
            self._loop.forget(sock.fileno())
        self._other.is_next = True
        return data, list(self._listeners.values())

    def keep(self) -> None:
        """See ``control.LinkCommands``."""
        self._other.is_next = False  # it has not served
        if self._next_control is not None:
            address = bound_address(self._next_control)
            self._next_control.close()
            self._next_control = None
            unlink_own(address)
        for text, sock in self._listeners.items():
            self._watch(text, sock)

    def handed_over(self) -> None:
        """See ``control.LinkCommands``."""
        assert self._next_control is not None  # ``offer`` has made it
        name = f"{self._config.plane}.{os.getpid()}"
        self._control_address = Address(path=self._path_as(name))
        os.rename(self._next_control.getsockname(), self._control_address.path)
        for sock in self._listeners.values():
            sock.close()  # they are the next process's: their files stay
        self._listeners.clear()
        self._control.move(self._next_control)
        self._next_control = None
        self._drain_at_ns = self._clock.monotonic_ns() + round(self._config.drain_s * 1e9)
        self._control.send_hello(leaving=name)
        self._name = name
        log.info("handed-over", now_called=name, drain_s=self._config.drain_s)
        self._enforce(self._clock.monotonic_ns())
        self._let_clients_go(self._clock.monotonic_ns())

    def _path_as(self, name: str) -> str:
        return str(Path(self._config.control_socket).with_name(f"{name}.sock"))

    def _let_clients_go(self, now_ns: int) -> None:
        """Wait for clients to go, after ``drain_s`` ask them to; then hand over the last counts."""
        assert self._drain_at_ns is not None  # another process has taken over
        if self._is_stopping:
            return
        if now_ns >= self._drain_at_ns:
            for negotiation in tuple(self._negotiations):
                negotiation.close("another process serves this plane now")
            for volume in self._exports.volumes.values():
                for session in tuple(volume.sessions):
                    session.drain(moves=True)
        if self.connections or len(self._negotiations) or self._context.farewells:
            self._loop.at("leaving", now_ns + LEAVING_CHECK_NS, self._let_clients_go)
        else:
            self._finish_counts(now_ns)

    @property
    def connections(self) -> int:
        """Open connections of clients in transmission."""
        return sum(len(stream.sessions) for stream in self._cuts.table.streams)

    @property
    def listens(self) -> bool:
        """Whether clients can connect here."""
        return self._drain_at_ns is None

    def _wait_no_more(self, part: PlanePart) -> None:
        """The next process takes another part: our clients find it in force when they come there, now."""
        before, now_ns = part.digest, self._clock.monotonic_ns()
        try:
            part.read()
            if part.digest == before or self._is_stopping:
                return
        except ConfigError as exc:
            log.error("part-refused", problem=str(exc))
        log.info("waits-no-more", reason="the configuration was changed")
        self._drain_at_ns = now_ns
        self._let_clients_go(now_ns)

    # -- another part of the configuration ------------------------------------------------------------------

    def _on_hangup(self, part: PlanePart, hangup: Hangup) -> None:
        if not hangup.take():
            return
        if self._drain_at_ns is not None:
            self._wait_no_more(part)
            return
        try:
            self.reconfigure(part.read())
        except ConfigError as exc:
            log.error("part-refused", problem=str(exc))
            self._problems["part"] = str(exc)
            self._control.send_hello()

    def reconfigure(self, config: PlaneConfig) -> None:
        """Run with another part from now on. Clients of what stays see nothing of it, if they may use it.

        Raises:
            ConfigError: it cannot be used; nothing was changed.
        """
        gid = self._socket_gid
        if config.security.socket_group != self._config.security.socket_group:  # clients wait for the look-up
            gid = config.security.socket_gid(config.plane)
        self._guard.apply(config.security)
        self._config = config
        self._problems.clear()
        self._give_sockets(gid)
        self._listen_at(config.listen if config.exports else [])
        for volume in self._exports.apply(config):
            self._exports.ask(volume)
        self._end_refused()
        self._caps.static, self._caps.static_groups = configured_caps(config)
        self._enforce(self._clock.monotonic_ns())
        log.info(
            "part-taken", listening=[str(address) for address in self.listening], volumes=self._exports.names
        )
        self._control.send_hello()
        if not config.exports:
            self._stop_when_drained(self._clock.monotonic_ns())

    def _give_sockets(self, gid: int) -> None:
        """Let members of another group connect; who is connected stays."""
        if gid == self._socket_gid:
            return
        self._socket_gid = gid
        for text, sock in self._listeners.items():
            if path := bound_address(sock).path:
                try:
                    os.chown(path, -1, gid if gid >= 0 else os.getegid())
                except OSError as exc:
                    self._problems[f"group of {text}"] = f"{text}: socket_group: {exc.strerror}"

    def _stop_when_drained(self, now_ns: int) -> None:
        if self._exports.names:  # it has got exports again
            return
        if self._exports.is_drained and self._stop is not None:
            self._stop.set("it was removed from the configuration")
        else:
            self._loop.at("removed", now_ns + REMOVED_CHECK_NS, self._stop_when_drained)

    def _listen_at(self, wanted: list[str]) -> None:
        for text in [text for text in self._listeners if text not in wanted]:
            self._listen_no_more(text)
        for text in wanted:
            if text not in self._listeners:
                self._try_to_listen(text)

    def _try_to_listen(self, text: str) -> None:
        try:
            self._listen(text)
        except ConfigError as exc:
            if self._problems.get(text) != str(exc):
                log.error("cannot-listen", address=text, problem=exc.problem)
                self._problems[text] = str(exc)
            due_ns = self._clock.monotonic_ns() + LISTEN_AGAIN_NS
            self._loop.at(("listen", text), due_ns, lambda _now_ns: self._listen_again(text))

    def _listen_again(self, text: str) -> None:
        is_ours = self.listens and self._next_control is None and not self._is_stopping
        if is_ours and text in self._problems and text in self._config.listen:
            self._try_to_listen(text)
            if text in self._listeners:
                del self._problems[text]
                self._control.send_hello()

    def _listen(self, text: str) -> None:
        setting = f"[[plane]] {self._config.plane} listen"
        self._watch(text, listen_at(parse_listen(text), CLIENT_MODE, setting, self._socket_gid))

    def _watch(self, text: str, sock: socket.socket) -> None:
        self._listeners[text] = sock
        self._loop.watch(sock.fileno(), IN, partial(self._accept, sock), _ignore)

    def _listen_no_more(self, text: str) -> None:
        sock = self._listeners.pop(text)
        address = bound_address(sock)
        self._loop.forget(sock.fileno())
        sock.close()
        unlink_own(address)

    # -- clients --------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, _events: int) -> None:
        for _ in range(MAX_ACCEPTS):
            accepted = accept(listener, partial(self._loop.pause_input, listener.fileno()))
            if accepted is None:
                return
            self._begin(accepted[0])

    def _begin(self, sock: socket.socket) -> None:
        try:
            prepare(sock)
            client = identity_of(sock)
            tls = self._guard.mode_for(client)
            if tls is None or not self._negotiations.make_room(client):
                sock.close()
                return
            negotiation = Negotiation(
                self._loop, sock, self._exports, self._negotiations.discard, self._guard, tls
            )
        except OSError:  # gone between its connect and our accept
            sock.close()
            return
        self._negotiations.add(negotiation)
        negotiation.start()

    def _on_lists(self) -> None:
        """Other revocation lists are in force, or one has expired."""
        self._end_refused()
        self._control.send_hello()

    def _end_refused(self) -> None:
        sessions = (session for stream in self._cuts.table.streams for session in stream.sessions)
        self._guard.end_refused((*sessions, *self._negotiations))

    def _on_learned(self) -> None:
        self._control.send_hello()

    # -- the link's commands --------------------------------------------------------------------------------

    def hello(self) -> DpHello:
        """See ``control.LinkCommands``."""
        problems = (self._guard.problem, *self._problems.values())
        return DpHello(
            plane=self._name,
            pid=os.getpid(),
            exports=self._exports.describe() if self.listens else [],
            listening=[str(address) for address in self.listening],
            is_stopping=self._is_stopping,
            config=self._part.digest if self._part is not None else None,
            problems=tuple(text[:MOST_CHARACTERS] for text in problems if text)[:MOST_PROBLEMS],
        )

    def report(self) -> PlaneReport:
        """See ``control.LinkCommands``."""
        now_ns = self._clock.monotonic_ns()
        self._expire(now_ns)
        handed_over = None
        if self._drain_at_ns is not None:
            handed_over = HandedOver(self.connections, max(self._drain_at_ns - now_ns, 0) / 1e9)
        return plane_report(self.hello(), self._exports, self._caps, self._cuts, now_ns, handed_over)

    def collect(self, got: int) -> bytes | None:
        """See ``control.LinkCommands``."""
        now_ns = self._clock.monotonic_ns()
        self._expire(now_ns)
        found = self._cuts.collect(got, now_ns, self._clock.unix_us())
        if found is None and self._drain_at_ns is not None and self._stop is not None:
            self._stop.set("its clients have gone, and the link has all it has counted")
        return found

    def caps(self, caps: PlaneCaps) -> None:
        """See ``control.LinkCommands``."""
        now_ns = self._clock.monotonic_ns()
        capped = self._caps.apply(caps, now_ns)
        log.info("caps-in-force", gen=self._caps.generation, caps=capped)
        self._enforce(now_ns)

    def thresholds(self, thresholds: PlaneThresholds) -> None:
        """See ``control.LinkCommands``."""
        left_out = self._cuts.set_thresholds(thresholds, self._clock.monotonic_ns(), self._clock.unix_us())
        self._thresholds = thresholds
        if left_out:
            log.warning("thresholds-left-out", version=thresholds.version, left_out=left_out)

    def costs(self, costs: Costs) -> None:
        """See ``control.LinkCommands``."""
        self._costs = costs
        fitted = {
            each["backend"]: FittedCost(each["cost_write"], each["cost_bytes"]) for each in costs.backends
        }
        self._exports.set_costs(fitted)
        log.info("costs-in-force", version=costs.version, backends=len(fitted))

    def lease(self) -> None:
        """See ``control.LinkCommands``."""
        now_ns = self._clock.monotonic_ns()
        self._expire(now_ns)  # a renewal that comes too late renews nothing
        self._caps.renew(now_ns)
        self._plan_expiry()

    def _expire(self, now_ns: int) -> None:
        if self._caps.expire(now_ns):
            log.warning("lease-expired", text="the server's caps were not renewed; static caps hold")
            self._enforce(now_ns)

    def _enforce(self, now_ns: int) -> None:
        former = self._former.number
        if not self.listens:  # this process is one of them, and the next one is beside it
            former = 1
            with contextlib.suppress(OSError):  # without descriptors: it is this one alone, most of the time
                former = max(former, len(former_sockets(self._config.control_socket)))
        self._caps.processes = 1 + former
        self._cuts.set_generation(self._caps.generation)
        for name, volume in self._exports.volumes.items():
            clients, others = self._caps.of_clients(name), self._caps.named_clients(name)
            volume.set_caps(self._caps.of(name), now_ns, clients, others)
        self._groups.apply(self._caps.groups, self._exports.volumes, now_ns, self._caps.whole_clients)
        self._exports.set_cost_capped(self._caps.cost_capped(self._exports.names))
        self._plan_expiry()

    def _plan_expiry(self) -> None:
        if self._caps.lease_end_ns is None:
            self._loop.cancel(self)
        else:
            self._loop.at(self, self._caps.lease_end_ns, self._expire)

    # -- end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every connection, file and socket; remove the socket files."""
        self._end_clients()
        for farewell in tuple(self._context.farewells):
            farewell.close()
        self._tls_engine.stop()
        self._control.close()
        unlink_own(self._control_address)
        self._exports.close()
        self._context.pipes.close()
        self._loop.close()
        self._run_delay.close()

    def _end_clients(self) -> None:
        for text in tuple(self._listeners):
            self._listen_no_more(text)
        for negotiation in tuple(self._negotiations):
            negotiation.close("the plane stops")
        for stream in self._cuts.table.streams:
            for session in tuple(stream.sessions):
                session.close("the plane stops")


def _ignore(_exc: Exception) -> None:
    """A listening socket outlives a failed accept; the loop has logged it."""


@click.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), required=True, help="The agent's TOML file."
)
@click.option("--plane", required=True, help="Name of this plane, as in the file.")
@click.option(
    "--take-over",
    "takes_over",
    is_flag=True,
    help="Serve in the place of the process that does so now, if any.",
)
def main(path: Path, plane: str, takes_over: bool) -> None:
    """Serve volumes over NBD, count and throttle their I/O."""
    with outermost(plane):
        agent = load_agent(path)
        with failure_recorded(agent.runtime_dir, plane):
            _serve(PlanePart(agent, plane), plane, takes_over)


def _serve(part: PlanePart, plane: str, takes_over: bool) -> None:
    logs.configure(plane)
    raise_open_files(OPEN_FILES)  # a shell gives 1,024, which 500 clients before upstreams use up
    stop = Stop()
    stop.install_signals()
    hangup = Hangup()
    hangup.install()
    stop.watch_parent()
    inherited = take_over(part.config.control_socket, plane, SystemClock()) if takes_over else None
    served = Plane(part.config, inherited=inherited)
    if inherited is not None:
        inherited.confirm()
    try:
        served.run(stop, part, hangup)
    finally:
        served.close()


if __name__ == "__main__":
    main()
