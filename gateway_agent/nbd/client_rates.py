"""Rates of single clients of one volume, and those that clients share by a glob, beside the volume's own.

A client has rates of its own only while the server caps it; all its connections share them. Rates of a glob
are shared by all clients that match it, also by those that come later under any name: so a client gains
nothing by a new name. ``*`` is all that no agreement names. An I/O passes when the rates of its volume, of
its client, and those of its glob, if there are any, let it. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pmdaemon.wire.messages.client_caps import is_glob, is_of_glob
from pmdaemon.wire.rates import FormerRates, Rates, RateSet

NO_CLIENTS: Final[Mapping[str, Rates]] = {}
NO_OTHERS: Final[Mapping[str, Sequence[str]]] = {}
MOST_KNOWN: Final = 4096
"""Clients of which is remembered which rates hold for them; names may change for ever."""


class HeldRates(NamedTuple):
    """The rates that hold for a client: its own, and those it shares."""

    own: RateSet | None
    shared: RateSet | None


class ClientRates:
    """The rates in force, by client; false while no client has any.

    Args:
        tau_ns: burst depth of each; ``since_ns``: see ``RateSet``.

    Invariant: a client is known in ``_by_client`` exactly while one of its rates is limited.
    """

    __slots__ = ("_by_client", "_former", "_found", "_others")

    def __init__(self, tau_ns: int, since_ns: int | None = None) -> None:
        self._former = FormerRates(tau_ns, since_ns)
        self._by_client: dict[str, RateSet] = {}
        self._others: dict[str, tuple[str, ...]] = {}
        self._found: dict[str, HeldRates] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def __contains__(self, client: str) -> bool:
        return self.held_of(client) != (None, None)

    def set_caps(
        self, caps: Mapping[str, Rates], now_ns: int, others: Mapping[str, Sequence[str]] = NO_OTHERS
    ) -> bool:
        """Put the complete ``caps`` in force; one that stays keeps its debt, one that returns its burst.

        Args:
            caps: by client, or by a glob: of all that match it, together.
            now_ns: monotonic.
            others: by such a glob, globs of the clients that it is not for.

        Returns:
            Whether anything changed.
        """
        wanted = {client: rates for client, rates in caps.items() if not rates.is_open}
        gone = self._by_client.keys() - wanted.keys()
        for client in gone:
            self._former.keep(client, self._by_client.pop(client), now_ns)
        of_globs = {glob: tuple(others.get(glob, ())) for glob in sorted(filter(is_glob, wanted))}
        changed = bool(gone) or of_globs != self._others
        self._others = of_globs
        self._found.clear()
        for client, rates in wanted.items():
            if client not in self._by_client:
                self._by_client[client] = self._former.take(client)
            changed |= self._by_client[client].set_caps(rates, now_ns)
        return changed

    def ready_ns(self, client: str) -> int:
        """From this moment the client's next I/O may pass, as far as these rates go."""
        return max((rates.ready_ns() for rates in self.held_of(client) if rates is not None), default=0)

    def shared_of(self, client: str) -> RateSet | None:
        """The rates that the client shares with others; None where it shares none."""
        return self.held_of(client).shared

    def held_of(self, client: str) -> HeldRates:
        """The rates that hold for a client."""
        found = self._found.get(client)
        if found is None:
            globs = (glob for glob, others in self._others.items() if is_of_glob(client, glob, others))
            found = HeldRates(self._by_client.get(client), self._by_client.get(next(globs, "")))
            if len(self._found) >= MOST_KNOWN:
                self._found.clear()
            self._found[client] = found
        return found
