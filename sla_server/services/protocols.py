"""What the services' core needs of its neighbours, as protocols: the control brain and the looker.

``brain.Brain`` and ``looker.Looker`` fulfil them; tests bring their own.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pmdaemon.wire.cut import Cut
from sla_server.agreements.promise import Promise, VolumeClass
from sla_server.services.catalog import Catalog
from sla_server.services.control.decisions import Decision
from sla_server.services.sql_worker import SqlState


class ControllerProtocol(Protocol):
    """The control loop: pure, told everything, asked for decisions (``brain``)."""

    def set_agreements(self, promises: Sequence[Promise], classes: Sequence[VolumeClass]) -> None:
        """The agreements in force."""

    def gateway_up(self, gateway_id: str, name: str, exports: Sequence[dict[str, Any]], now_ns: int) -> None:
        """A gateway registered."""

    def gateway_lost(self, gateway_id: str, reason: str, now_ns: int) -> None:
        """A gateway is gone or stalled."""

    def cuts_dropped(self, gateway_id: str, cuts: int) -> None:
        """How many cuts its spool has lost in its life."""

    def add_streams(self, gateway_id: str, streams: Sequence[dict[str, Any]]) -> None:
        """Streams of a gateway."""

    def add_cut(self, cut: Cut, recv_us: int, offset_us: int, live: bool, now_ns: int) -> None:
        """Statistics."""

    def caps_state(self, gateway_id: str, gen: int, state: str, reason: str, at_unix_us: int) -> None:
        """What became of SetCaps, and when."""

    def set_mode(self, mode: str) -> None:
        """Switch between observe and enforce."""

    def set_budget(self, key: tuple[str, str], burn_1h: float, remaining_ratio: float) -> None:
        """How much an objective may still miss."""

    def can_throttle(self, volume: str) -> bool:
        """Whether caps of a volume can have an effect."""

    def manual_set(
        self,
        throttle_id: str,
        volume: str,
        *,
        cost_per_s: float | None = None,
        ops_per_s: float | None = None,
        bytes_per_s: float | None = None,
        until_unix_us: int | None = None,
        who: str = "",
        reason: str = "",
    ) -> None:
        """An operator's throttle."""

    def manual_release(
        self, volume: str | None = None, throttle_id: str | None = None, who: str = ""
    ) -> list[str]:
        """Release operators' throttles; the ids released."""

    def set_policy_caps(self, version: int, caps: Mapping[str, float | None]) -> None:
        """Caps of the current hour."""

    def restore(self, throttle_rows: Sequence[dict[str, Any]]) -> None:
        """Throttles in force before a restart."""

    def tick(self, now_ns: int, unix_us: int) -> list[Decision]:
        """Decide."""

    def snapshot(self, unix_us: int, most: int) -> dict[str, Any]:
        """The live view, at most ``most`` rows of each kind."""

    def promise_states(self, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
        """``state`` and ``u`` of these objectives as far as they are in force."""


class SqlWorkerProtocol(Protocol):
    """The reader of SQL (``looker``)."""

    found: queue.SimpleQueue[SqlState]

    def set_catalog(self, catalog: Catalog) -> None:
        """Judge by these agreements."""

    @property
    def trouble(self) -> str:
        """Why the database cannot be read; "" while it can."""

    def look_for_policy(self) -> None:
        """Look for a policy now."""
