"""Rates of single clients of one volume, and those that all its other clients share, beside the volume's own.

A client has rates of its own only while the server caps it; all its connections share them. Rates of ``*``
are shared by all clients that no agreement names, also by those that come later under any name: so a client
gains nothing by a new name. An I/O passes when the rates of its volume, of its client, and where it is one of
them those of all others let it. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from pmdaemon.wire.messages.client_caps import OTHER_CLIENTS
from pmdaemon.wire.rates import Rates, RateSet

NO_CLIENTS: Final[Mapping[str, Rates]] = {}
MOST_KNOWN: Final = 4096
"""Clients of which is remembered which rates hold for them; names may change for ever."""


class ClientRates:
    """The rates in force, by client; false while no client has any.

    Args:
        tau_ns: burst depth of each.

    Invariant: a client is known in ``_by_client`` exactly while one of its rates is limited.
    """

    __slots__ = ("_by_client", "_found", "_named", "_tau_ns")

    def __init__(self, tau_ns: int) -> None:
        self._tau_ns = tau_ns
        self._by_client: dict[str, RateSet] = {}
        self._named: tuple[str, ...] = ()
        self._found: dict[str, tuple[RateSet, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def __contains__(self, client: str) -> bool:
        return bool(self._of(client))

    def set_caps(self, caps: Mapping[str, Rates], now_ns: int, named: Sequence[str] = ()) -> bool:
        """Put the complete ``caps`` in force; a rate that stays keeps its debt.

        Args:
            caps: by client; ``*``: of all others together.
            now_ns: monotonic.
            named: globs of the clients that those others are not.

        Returns:
            Whether anything changed.
        """
        wanted = {client: rates for client, rates in caps.items() if not rates.is_open}
        gone = self._by_client.keys() - wanted.keys()
        for client in gone:
            del self._by_client[client]
        changed = bool(gone) or tuple(named) != self._named
        self._named = tuple(named)
        self._found.clear()
        for client, rates in wanted.items():
            changed |= self._by_client.setdefault(client, RateSet(self._tau_ns)).set_caps(rates, now_ns)
        return changed

    def ready_ns(self, client: str) -> int:
        """From this moment the client's next I/O may pass, as far as these rates go."""
        return max((rates.ready_ns() for rates in self._of(client)), default=0)

    def charge_own(self, client: str, now_ns: int, transfer_bytes: int, cost: float) -> None:
        """Admit one I/O of the client now, as far as the rates go that are its own alone."""
        shared = self._by_client.get(OTHER_CLIENTS)
        for rates in self._of(client):
            if rates is not shared:
                rates.charge(now_ns, transfer_bytes, cost)

    def shared_of(self, client: str) -> RateSet | None:
        """The rates that the client shares with others; None where it shares none."""
        shared = self._by_client.get(OTHER_CLIENTS)
        return shared if shared is not None and shared in self._of(client) else None

    def _of(self, client: str) -> tuple[RateSet, ...]:
        """The rates that hold for a client."""
        found = self._found.get(client)
        if found is None:
            own, shared = self._by_client.get(client), self._by_client.get(OTHER_CLIENTS)
            if shared is not None and any(fnmatchcase(client, glob) for glob in self._named):
                shared = None
            found = tuple(rates for rates in (own, shared) if rates is not None)
            if len(self._found) >= MOST_KNOWN:
                self._found.clear()
            self._found[client] = found
        return found
