"""Backends that hang or fail: no volume is slowed down for them, for that cannot help.

Slow storage and storage that does not answer look alike to one promise: both miss it. The other volumes on
the backend tell them apart. A backend is at *fault* while

    hangs    none of its volumes has completed an I/O for ``fault_stall_s`` (a tenth less, as polls are not
             of one length), though I/Os of one at least were sent upstream and outstanding all the time
    fails    every volume that completes I/Os has most of them fail

As long as one volume completes I/Os as it should, a hang of another may be the work of load: then the loop
does as with any promise at risk, and its effectiveness test ends the attempt if slowing others down does not
help. A volume that fails by itself (it is full, or read-only) is no fault of its backend, or it could keep
the loop from helping the others.

While a volume waits and none is known to have completed an I/O since then, it *may hang*: cuts of other
gateways that began before say nothing of it. Nobody is slowed down until their next cuts say which it is.

    sign seen --> suspended at once: no step of the loop, what is in force stays, for a lease at most
              --> ``storage-fault`` once it has lasted ``stale_s``
    no sign for ``fault_calm_s`` --> the loop goes on, with new windows
    no sign for ``backoff_s`` --> ``storage-recovered``; so storage that stutters raises few events

State: one ``_Fault`` by backend. Pure: no clock. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sla_server.services.control.decisions import RaiseEvent
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.usage import GatewayTable, UsageTable

HANGS = "hangs"
FAILS = "fails"
_TEXT = {
    HANGS: "completes no I/O though some is outstanding",
    FAILS: "fails most I/Os of every volume",
}


@dataclass(slots=True)
class _Fault:
    kind: str
    since_ns: int
    newest_ns: int
    is_reported: bool = False
    is_over: bool = False


class StorageFaults:
    """See the module."""

    def __init__(self, settings: ControlSettings, usage_table: UsageTable) -> None:
        self._settings, self._usage = settings, usage_table
        self._faults: dict[str, _Fault] = {}
        self._may_hang: set[str] = set()

    def restore(self, reported: Mapping[str, str], now_ns: int) -> None:
        """Faults that a process before has reported, and whose end it has not: backend to kind.

        Each ends with an event as any other does, also if it was over before.
        """
        for backend, kind in reported.items():
            self._faults[backend] = _Fault(kind, now_ns, now_ns, is_reported=True, is_over=True)

    def kind_of(self, backend: str) -> str:
        """``hangs``, ``fails``, or "" for a backend without a fault."""
        found = self._faults.get(backend)
        return found.kind if found is not None and not found.is_over else ""

    def since_ns(self, backend: str) -> int | None:
        """When its fault began, None without one."""
        found = self._faults.get(backend)
        return found.since_ns if found is not None and not found.is_over else None

    def may_hang(self, backend: str) -> bool:
        """Whether nothing is known to have completed since one of its volumes waits."""
        return backend in self._may_hang

    def check(self, tables: Mapping[str, GatewayTable], now_ns: int) -> tuple[list[RaiseEvent], list[str]]:
        """Follow the newest cuts; events due, and backends whose fault has ended."""
        s, events, ended = self._settings, list[RaiseEvent](), list[str]()
        signs, self._may_hang = self._usage.faults(
            self._silent(tables.values(), now_ns), s.fault_stall_s * 1e6
        )
        for backend, kind in signs.items():
            fault = self._faults.setdefault(backend, _Fault(kind, now_ns, now_ns))
            if fault.is_over:
                fault.since_ns, fault.is_over = now_ns, False
            fault.kind, fault.newest_ns = kind, now_ns
        for backend, fault in list(self._faults.items()):
            lasted_s, calm_ns = (fault.newest_ns - fault.since_ns) / 1e9, now_ns - fault.newest_ns
            if not fault.is_reported and lasted_s >= s.stale_s:
                fault.is_reported = True
                text = f"backend {backend} {_TEXT[fault.kind]}; no one is slowed down for that"
                events.append(_event("storage-fault", "critical", backend, text, fault.kind, lasted_s))
            if calm_ns >= s.fault_calm_s * 1e9 and not fault.is_over:
                fault.is_over = True
                ended.append(backend)
            if calm_ns >= s.backoff_s * 1e9 or (fault.is_over and not fault.is_reported):
                del self._faults[backend]
                if fault.is_reported:
                    text = f"backend {backend} has answered for {calm_ns / 1e9:.0f} s"
                    events.append(_event("storage-recovered", "info", backend, text, fault.kind, lasted_s))
        return events, ended

    def _silent(self, tables: Iterable[GatewayTable], now_ns: int) -> Iterator[GatewayTable]:
        """Gateways whose newest cut says nothing of now; looked for only when they are asked for."""
        limit_ns = self._settings.silent_s * 1e9
        for t in tables:
            if t.state != "up" or t.last_cut_ns is None or now_ns - t.last_cut_ns > limit_ns:
                yield t


def _event(kind: str, severity: str, backend: str, text: str, fault: str, lasted_s: float) -> RaiseEvent:
    details = {"backend": backend, "fault": fault, "lasted_s": round(lasted_s, 1)}
    return RaiseEvent(kind, severity, "backend", backend, text, details)
