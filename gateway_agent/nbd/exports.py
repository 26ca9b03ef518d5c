"""What this plane exports: names to volumes and clients, and the right kind of session for each.

Holds the volumes, the storages and worker pools of file mode, and the table of streams.

Exports change while the plane runs (``apply``). A removed volume is not found any more, its connections
are drained, and what it held open is let go when the last one has ended (``_Leaving``). Of one whose storage
changed, new clients see the new storage; those that are there keep what they opened. No other is touched.

A file that cannot be used makes its own export unavailable, not the plane: it is tried again after 1 s, then
after twice as long up to a minute, and when a client asks for it; each planned try that fails is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import structlog

from gateway_agent.config import ExportConfig, PlaneConfig
from gateway_agent.errors import BackingFileError, ExportRefused, GatewayError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.access import ClientIdentity, why_refused
from gateway_agent.nbd.accounting import StreamAccount
from gateway_agent.nbd.file_session import FileSession
from gateway_agent.nbd.proxy_session import ProxySession
from gateway_agent.nbd.session import NbdSession
from gateway_agent.nbd.sockets import Connection, uses_tls
from gateway_agent.nbd.storage import IN_USE, VolumeStorage, is_in_use
from gateway_agent.nbd.storage_jobs import LoopRunner, SyncedRunner, WorkerPool
from gateway_agent.nbd.upstream import Upstream, UpstreamOpening
from gateway_agent.nbd.upstream_tls import UpstreamTls
from gateway_agent.nbd.volume import ExtendedHeaders, PlaneContext, ThrottledSession, Volume
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.excerpt import printable
from pmdaemon.wire.names import is_name
from pmdaemon.wire.rates import RateSet

log = structlog.get_logger("exports")
RETRY_FIRST_S: Final = 1.0
RETRY_MOST_S: Final = 60.0
BURST_NS: Final = 20_000_000  # depth of each bucket: what the rate lets through in that time
MAX_HOLD_NS: Final = 5 * 10**9  # I/Os that caps hold for longer are reported; the rate always holds
LEAVING_CHECK_NS: Final = 500_000_000  # of what a removed volume held open: whether it can be let go
EXTENDED_AGAIN_NS: Final = 60 * 10**9  # between two questions whether an upstream has extended headers
SHOWN_CHARACTERS: Final = 300  # of a name that a client asks for: any volume, @ and any client fit
_LIVE: Final = frozenset(
    (
        "volume",
        "plane",
        "backend",
        "cost_read",
        "cost_write",
        "cost_bytes",
        "cost",
        "cost_trim",
        "cost_zeroes",
        "cap",
        "allow_names",
        "allow_networks",
        "plain_networks",
    )
)
"""Keys of an export that hold at once, also for those that use it; another of the rest is another storage."""


_COSTS: Final = ("cost_read", "cost_write", "cost_bytes")


class FittedCost(NamedTuple):
    """Of one backend, in units of a read: of a write (None: not known), and bytes that cost 1."""

    cost_write: float | None
    cost_bytes: float


def client_of(name: str, address_name: str, volumes: set[str], rule: str) -> tuple[str, str]:
    """Volume and client that an export name means. Pure.

    Args:
        name: as the client asked; empty means the only export, if there is just one.
        address_name: the client's name by its address.
        volumes: those exported here.
        rule: ``client_rule`` of the configuration.

    Raises:
        ExportRefused: no such volume, or a suffix that cannot name a client.
    """
    if name in volumes:
        return name, address_name
    if not name and len(volumes) == 1:
        return next(iter(volumes)), address_name
    volume, at, client = name.rpartition("@")
    if rule == "export-suffix" and at and volume in volumes:
        if not is_name(client):
            raise ExportRefused(
                p.Rep.ERR_INVALID, f"{_shown(client)!r} behind the @ cannot be the name of a client"
            )
        return volume, client
    raise ExportRefused(
        p.Rep.ERR_UNKNOWN, f"no volume {_shown(name)!r} here; list the exports to see which there are"
    )


def _shown(name: str) -> str:
    """Anyone may ask for any name, and it gets into our log."""
    return printable(name, SHOWN_CHARACTERS)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """What a volume held open before it was removed, or got another storage.

    Attributes:
        has_gone: the volume itself is not exported any more.
        sessions: those that use it; of a volume that has gone also any that come.
    """

    volume: Volume
    has_gone: bool
    sessions: set[ThrottledSession]
    storage: VolumeStorage | None
    runner: WorkerPool | SyncedRunner | None

    @property
    def users(self) -> set[ThrottledSession]:
        """Connections that use it."""
        return self.sessions | self.volume.sessions if self.has_gone else self.sessions

    @property
    def has_ended(self) -> bool:
        """Whether none of it is in use."""
        is_idle = self.runner is None or self.runner.is_idle
        return is_idle and all(session.is_closed for session in self.users)

    def release(self) -> None:
        """End its threads, close its file."""
        if self.runner is not None:
            self.runner.stop()
        if self.storage is not None:
            self.storage.release()


def _storage_of(export: ExportConfig) -> tuple[object, ...]:
    """What a client opens, and how."""
    return tuple(getattr(export, name) for name in ExportConfig.model_fields if name not in _LIVE)


class ExportTable:
    """See the module docstring.

    Args:
        config: of the plane.
        context: what its connections share.
        on_learned: called when the size of a volume has become known or has changed.
        ask: for tests: asks the upstream of a volume for what is known of it at the start.
    """

    def __init__(
        self,
        config: PlaneConfig,
        context: PlaneContext,
        on_learned: Callable[[], None],
        ask: Callable[[Volume], None] | None = None,
    ) -> None:
        self.names = [export.volume for export in config.exports]
        self.volumes: dict[str, Volume] = {}
        self._seen: tuple[ClientIdentity, list[str]] | None = None  # what the last client may see
        self._rule = config.client_rule
        self._context = context
        self._on_learned = on_learned
        self.ask = ask or self._ask_upstream
        self._storages: dict[str, VolumeStorage] = {}
        self._runners: dict[str, WorkerPool | SyncedRunner] = {}
        self._turns = LoopRunner(context.loop)
        self._upstream_tls: dict[str, UpstreamTls] = {}
        self._leaving: list[_Leaving] = []
        self._fitted: dict[str, FittedCost] = {}
        self._cost_capped: frozenset[str] = frozenset()
        self._configured = config.exports
        context.cuts.table.set_exports(config.exports)
        for export in config.exports:
            self._add(export)

    def _add(self, export: ExportConfig) -> None:
        volume = Volume(export, self._rates(), self._context, MAX_HOLD_NS)
        self.volumes[export.volume] = volume
        self._open_first(volume)

    def _rates(self) -> RateSet:
        return RateSet(BURST_NS, self._context.bursts_since_ns)

    def _open_first(self, volume: Volume) -> None:
        if volume.export.file is not None:
            self._try(volume, Backoff(RETRY_FIRST_S, RETRY_MOST_S))
        if (storage := self._storages.get(volume.export.volume)) is not None:
            volume.facts = self._as_seen(volume, storage.facts)

    # -- changes --------------------------------------------------------------------------------------------

    def apply(self, config: PlaneConfig) -> list[Volume]:
        """Serve what ``config`` says from now on.

        Returns:
            Volumes that are new, or have another upstream: their size is not known yet.
        """
        self._seen = None
        self._configured = config.exports
        self._context.cuts.table.set_exports(config.exports)
        wanted = {export.volume: self._with_costs(export) for export in config.exports}
        self._rule = config.client_rule
        unknown = []
        for name in [name for name in self.names if name not in wanted]:
            self._remove(name)
        for export in wanted.values():
            volume = self.volumes.get(export.volume)
            if volume is None:
                self._add(export)
            elif volume.export == export or not self._change(volume, export):
                continue
            if export.upstream is not None:
                unknown.append(self.volumes[export.volume])
        self.names[:] = wanted  # negotiations under way list these
        self.volumes = {name: self.volumes[name] for name in wanted}
        return unknown

    def set_costs(self, fitted: Mapping[str, FittedCost]) -> None:
        """What an I/O costs by backend, complete; for exports that want it, see ``set_cost_capped``."""
        self._fitted = dict(fitted)
        self._charge()

    def set_cost_capped(self, volumes: frozenset[str]) -> None:
        """Caps of the server limit the cost of these volumes.

        Such a rate is in units of the costs that the volume had when it was computed, and so is what a loop
        goes on to compute from it. So the volume keeps these costs until no such cap is in force.
        """
        freed, self._cost_capped = self._cost_capped - volumes, volumes
        if freed:
            self._charge()

    def _charge(self) -> None:
        """Other costs hold from now on."""
        for export in self._configured:
            volume, wanted = self.volumes.get(export.volume), self._with_costs(export)
            if volume is not None and volume.export != wanted:
                self._change(volume, wanted)

    def _with_costs(self, export: ExportConfig) -> ExportConfig:
        if export.cost != "fitted":
            return export
        volume, found = self.volumes.get(export.volume), self._fitted.get(export.backend)
        if export.volume in self._cost_capped and volume is not None and volume.export.cost == "fitted":
            return export.model_copy(update={name: getattr(volume.export, name) for name in _COSTS})
        if found is None:
            return export
        # Where no write was seen, a write costs so many reads as the file says.
        write = found.cost_write if found.cost_write is not None else export.cost_write / export.cost_read
        costs = {"cost_read": 1.0, "cost_write": write, "cost_bytes": found.cost_bytes}
        return export.model_copy(update=costs)

    def _remove(self, name: str) -> None:
        volume = self.volumes.pop(name)
        log.info("export-removed", volume=name, connections=len(volume.sessions))
        self._retire(volume, has_gone=True)
        for session in tuple(volume.sessions):
            session.drain()

    def _change(self, volume: Volume, export: ExportConfig) -> bool:
        """Take another configuration of a volume; returns whether its storage is another one."""
        before, volume.export = volume.export, export
        log.info("export-changed", volume=export.volume, connections=len(volume.sessions))
        self._context.cuts.table.change(export)
        if _storage_of(before) == _storage_of(export):
            return False
        self._retire(volume, has_gone=False)
        volume.facts = None
        volume.extended = ExtendedHeaders()
        self._open_first(volume)
        return True

    def _retire(self, volume: Volume, *, has_gone: bool) -> None:
        """Let go of what a volume holds open, once the connections that are there have ended."""
        name = volume.export.volume
        self._context.loop.cancel(("open", volume))
        leaving = _Leaving(
            volume,
            has_gone,
            set(volume.sessions),
            self._storages.pop(name, None),
            self._runners.pop(name, None),
        )
        self._leaving.append(leaving)
        self._check_leaving(self._context.clock.monotonic_ns())

    def _check_leaving(self, now_ns: int) -> None:
        for leaving in tuple(self._leaving):
            if leaving.has_ended:
                leaving.release()
                self._leaving.remove(leaving)
                if leaving.has_gone:
                    self._context.cuts.volumes.remove(leaving.volume)
        if self._leaving:
            self._context.loop.at(("leaving", self), now_ns + LEAVING_CHECK_NS, self._check_leaving)

    def leaving(self) -> dict[str, int]:
        """Connections that use what was removed or replaced, by volume."""
        found: dict[str, int] = {}
        for each in self._leaving:
            name = each.volume.export.volume
            found[name] = found.get(name, 0) + sum(not session.is_closed for session in each.users)
        return found

    @property
    def is_drained(self) -> bool:
        """Whether no removed volume has a connection any more."""
        return not any(leaving.volume.sessions for leaving in self._leaving if leaving.has_gone)

    # -- storage --------------------------------------------------------------------------------------------

    def _open(self, volume: Volume) -> VolumeStorage:
        """The file of a volume as it is now: opened again if it was replaced or changed its size.

        Clients that are there keep what they have open.

        Raises:
            BackingFileError: it cannot be used.
        """
        export, name = volume.export, volume.export.volume
        assert export.file is not None  # the caller knows: the volume has no upstream
        storage = self._storages.get(name)
        try:
            if storage is not None and storage.is_current():
                return storage
        except OSError as exc:
            raise BackingFileError(name, export.file, exc.strerror or str(exc)) from exc
        fresh = VolumeStorage(name, export.file, read_only=export.read_only)
        if not export.read_only and is_in_use(export.file):
            log.warning("device-in-use", volume=name, device=export.file, text=IN_USE)
        if storage is not None:
            storage.release()
        elif export.workers:
            self._runners[name] = WorkerPool(self._context.loop, name, export.workers)
        else:
            self._runners[name] = SyncedRunner(self._context.loop, name, self._turns)
        self._storages[name] = fresh
        return fresh

    def _try(self, volume: Volume, backoff: Backoff) -> None:
        """Open the file of a volume; if that fails, say so and plan the next try."""
        try:
            self._open(volume)
        except BackingFileError as exc:
            wait_s = backoff.failed()
            log.error("export-refused", volume=volume.export.volume, error=str(exc), again_in_s=wait_s)
            due_ns = self._context.clock.monotonic_ns() + round(wait_s * 1e9)
            self._context.loop.at(("open", volume), due_ns, lambda _now: self._retry(volume, backoff))

    def _retry(self, volume: Volume, backoff: Backoff) -> None:
        if volume.export.volume not in self._storages:  # a client's try may have succeeded
            self._try(volume, backoff)
            self._report_if_open(volume)

    def _report_if_open(self, volume: Volume) -> None:
        if (storage := self._storages.get(volume.export.volume)) is not None:
            self.learn(volume, storage.facts)

    def visible(self, client: ClientIdentity) -> list[str]:
        """Names of the exports that this client may see; not to be changed.

        Kept for the next question: of 512 exports it takes 0.4 ms, and a client may ask 256 times in a turn.
        """
        if self._seen is None or self._seen[0] != client:
            names = [name for name, each in self.volumes.items() if not why_refused(each.export, client)]
            self._seen = client, names
        return self._seen[1]

    def has_extended(self, client: ClientIdentity) -> bool:
        """Whether every export that this client may see has extended headers, which only upstreams have.

        It is asked before the client names its export. Where it is not so, upstreams that had none when they
        were asked last are asked again, for the clients that come later.
        """
        volumes = [self.volumes[name] for name in self.visible(client)]
        lacking = [volume for volume in volumes if not volume.extended.has]
        now_ns = self._context.clock.monotonic_ns()
        for volume in lacking if all(volume.export.upstream for volume in volumes) else ():
            asked_ns = volume.extended.asked_ns
            if asked_ns is None or now_ns - asked_ns >= EXTENDED_AGAIN_NS:
                self.ask(volume)
        return bool(volumes) and not lacking

    def _ask_upstream(self, volume: Volume, backoff: Backoff | None = None) -> None:
        """Learn an upstream's size, and if it has extended headers.

        One that has never answered is asked again until it does, or a client's connection has learned it.
        """
        uri = volume.export.upstream
        if uri is None:
            return
        volume.extended.asked_ns = self._context.clock.monotonic_ns()

        def on_ready(_upstream: Upstream | None, facts: p.ExportFacts) -> None:
            volume.extended.has = opening.agreed.extended
            self.learn(volume, facts)

        def on_failed(error: GatewayError) -> None:
            again_in_s = self._ask_again(volume, backoff or Backoff(RETRY_FIRST_S, RETRY_MOST_S))
            log.warning(
                "upstream-not-there", volume=volume.export.volume, error=str(error), again_in_s=again_in_s
            )

        opening = UpstreamOpening(
            self._context.loop,
            uri,
            on_ready,
            on_failed,
            will_transmit=False,
            wants_block_size=True,
            tls=self.upstream_tls(volume),
            mode=p.ReplyMode(structured=True, extended=True),
        )

    def _ask_again(self, volume: Volume, backoff: Backoff) -> float | None:
        """Plan the next question to an upstream of which nothing is known; in how many seconds."""

        def ask(_now_ns: int) -> None:
            if self._is_unknown(volume):  # a client's connection may have succeeded
                self._ask_upstream(volume, backoff)

        if not self._is_unknown(volume):
            return None
        wait_s = backoff.failed()
        due_ns = self._context.clock.monotonic_ns() + round(wait_s * 1e9)
        self._context.loop.at(("ask", volume), due_ns, ask)
        return wait_s

    def _is_unknown(self, volume: Volume) -> bool:
        return volume.facts is None and self.volumes.get(volume.export.volume) is volume

    def find(self, name: str, client: ClientIdentity) -> tuple[Volume, str]:
        """Volume and client of an export name.

        Raises:
            ExportRefused: see ``client_of``; one that the client may not see is refused as an unknown one.
        """
        called = client.called(self._rule)
        try:
            volume, called = client_of(name, called, set(self.visible(client)), self._rule)
        except ExportRefused as exc:
            exc.reason = self._hidden(name, client)
            raise
        return self.volumes[volume], called

    def _hidden(self, name: str, client: ClientIdentity) -> str:
        """Why the client may not see the export that it names; empty if there is none."""
        volume = self.volumes.get(name) or self.volumes.get(name.rpartition("@")[0])
        reason = why_refused(volume.export, client) if volume is not None else ""
        return f"{_shown(name)}: {reason}" if reason else ""

    def upstream_tls(self, volume: Volume) -> UpstreamTls | None:
        """How to speak TLS with the upstream of a volume; None if it is spoken to without."""
        export, engine = volume.export, self._context.tls_engine
        if engine is None or not uses_tls(export.upstream or ""):
            return None
        found = self._upstream_tls.get(export.volume)
        if found is None or found.export is not export:
            found = self._upstream_tls[export.volume] = UpstreamTls(self._context.loop, engine, export)
        return found

    def stream(self, volume: Volume, client: str) -> StreamAccount:
        """Where this client's I/O on this volume is counted.

        Raises:
            ExportRefused: too many streams.
        """
        cuts = self._context.cuts
        return cuts.table.get(volume.export, client, cuts.thresholds)

    def file_facts(self, volume: Volume) -> p.ExportFacts:
        """Facts of a volume in file mode.

        Raises:
            ExportRefused: its file cannot be used now.
        """
        try:
            facts = self._open(volume).facts
        except BackingFileError as exc:
            text = f"the storage behind this export is not available: {exc}"
            raise ExportRefused(p.Rep.ERR_UNKNOWN, text) from exc
        return self.learn(volume, facts)

    def learn(self, volume: Volume, facts: p.ExportFacts) -> p.ExportFacts:
        """Facts as clients of this gateway see them; remembered for DP_HELLO."""
        seen = self._as_seen(volume, facts)
        is_news = volume.facts is None or volume.facts.size_bytes != seen.size_bytes
        volume.facts = seen
        if is_news:
            log.info("volume-known", volume=volume.export.volume, size_bytes=seen.size_bytes)
            self._on_learned()
            if volume.export.upstream_connections > 1 and not seen.flags & p.TX_CAN_MULTI_CONN:
                text = "its upstream lacks CAN_MULTI_CONN: each of a client's connections has one to it"
                log.warning("one-upstream-connection", volume=volume.export.volume, text=text)
        return seen

    @staticmethod
    def _as_seen(volume: Volume, facts: p.ExportFacts) -> p.ExportFacts:
        flags = facts.flags & p.TX_PASSED_ON | p.TX_HAS_FLAGS
        if volume.export.read_only:
            flags = flags & ~p.TX_CHANGES | p.TX_READ_ONLY
        return replace(facts, flags=flags)

    def session(
        self,
        sock: Connection,
        volume: Volume,
        stream: StreamAccount,
        facts: p.ExportFacts,
        up: Upstream | None,
        mode: p.ReplyMode = p.SIMPLE_REPLIES,
    ) -> NbdSession:
        """Start the transmission phase of one client."""
        name = volume.export.volume
        log.info("client-connected", volume=name, client=stream.client)
        made: NbdSession
        if up is not None:
            made = ProxySession(self._context, sock, volume, stream, facts, up, mode)
        else:
            storage, runner = self._storage_for(stream, self._storages[name]), self._runners[name]
            made = FileSession(self._context, sock, volume, stream, storage, facts, runner, mode)
        if self.volumes.get(name) is not volume:  # removed while its upstream was asked
            made.drain()
        return made

    @staticmethod
    def _storage_for(stream: StreamAccount, newest: VolumeStorage) -> VolumeStorage:
        """What a client's other connections have open, if a flush of it has failed: see ``storage``."""
        opened = [each.storage for each in stream.sessions if isinstance(each, FileSession)]
        failed = (each for each in opened if each.flush_has_failed and each.is_same_file(newest))
        return next(failed, newest)

    def describe(self) -> list[dict[str, object]]:
        """Exports as DP_HELLO names them; a size that is not known yet is 0."""
        return [_description(volume.export, volume.facts) for volume in self.volumes.values()]

    def close(self) -> None:
        """Finish the writes that have begun, end the workers, close the files."""
        self._turns.stop()
        for leaving in self._leaving:
            leaving.release()
        for runner in self._runners.values():
            runner.stop()
        for storage in self._storages.values():
            storage.release()


def _description(export: ExportConfig, facts: p.ExportFacts | None) -> dict[str, object]:
    return {
        "volume": export.volume,
        "backend": export.backend,
        "size_bytes": facts.size_bytes if facts is not None else 0,
        "read_only": export.read_only or bool(facts is not None and facts.flags & p.TX_READ_ONLY),
        "source": "nbd",
    }
