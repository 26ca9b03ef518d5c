"""Rates of single clients of one volume, which hold beside the volume's own.

A client has rates only while the server caps it; all its connections share them. An I/O passes when both the
volume's rates and its client's let it. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pmdaemon.wire.rates import Rates, RateSet

NO_CLIENTS: Final[Mapping[str, Rates]] = {}


class ClientRates:
    """The rates in force, by client; false while no client has any.

    Args:
        tau_ns: burst depth of each.

    Invariant: a client is known here exactly while one of its rates is limited.
    """

    __slots__ = ("_by_client", "_tau_ns")

    def __init__(self, tau_ns: int) -> None:
        self._tau_ns = tau_ns
        self._by_client: dict[str, RateSet] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def __contains__(self, client: str) -> bool:
        return client in self._by_client

    def set_caps(self, caps: Mapping[str, Rates], now_ns: int) -> bool:
        """Put the complete ``caps`` in force; a rate that stays keeps its debt.

        Returns:
            Whether anything changed.
        """
        wanted = {client: rates for client, rates in caps.items() if not rates.is_open}
        gone = self._by_client.keys() - wanted.keys()
        for client in gone:
            del self._by_client[client]
        changed = bool(gone)
        for client, rates in wanted.items():
            changed |= self._by_client.setdefault(client, RateSet(self._tau_ns)).set_caps(rates, now_ns)
        return changed

    def ready_ns(self, client: str) -> int:
        """From this moment the client's next I/O may pass, as far as its own rates go."""
        rates = self._by_client.get(client)
        return 0 if rates is None else rates.ready_ns()

    def charge(self, client: str, now_ns: int, transfer_bytes: int, cost: float) -> None:
        """Admit one I/O of the client now."""
        rates = self._by_client.get(client)
        if rates is not None:
            rates.charge(now_ns, transfer_bytes, cost)
