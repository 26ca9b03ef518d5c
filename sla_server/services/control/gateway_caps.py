"""What each gateway holds: the caps last issued to it, their generation, and when to send them again.

Generations are numbered over all gateways by one counter, so that a throttle's row needs one number. The
counter rises with the wall clock and with what this server issued, never with what a gateway reports: an odd
number harms the gateway that reports it and no other. A gateway reports in each cut the generation it held
during the whole of it:

    reported == issued      good
    -1                      it changed within that cut: wait for the next
    anything else           it restarted, its lease ran out, or a message was lost: after
                            ``reissue_after_s`` the complete set is sent again under a new generation; also
                            an empty one, to a gateway that holds caps nobody here knows of
    after our own restart   nothing is sent; what the gateway holds is taken over (``adopt``) as soon as a
                            cut shows a generation that can be it, and only otherwise sent again

Plain state, no clock. Changed only by the policy manager.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pmdaemon.wire.rates import Rates
from sla_server.services.control.settings import ControlSettings

MAX_GEN = 1 << 53
"""Generations, which are microseconds of the wall clock when issued, are below this (the year 2255)."""

SAME_RATIO = 0.01
"""Rates that differ by less are the same: an enforcer is no more exact."""


@dataclass(slots=True)
class GatewayCaps:
    """One gateway as a receiver of caps.

    Attributes:
        issued: volume to its rates at this gateway, as last sent (or adopted).
        whole: volume to its rates over all gateways when that was sent.
        adopting: lowest generation that may be the caps found in force after our restart; None when settled.
    """

    gateway_id: str
    up: bool = True
    gen: int = 0
    issued: dict[str, Rates] = field(default_factory=dict)
    whole: dict[str, Rates] = field(default_factory=dict)
    issued_ns: int = 0
    adopting: int | None = None
    keep_split: bool = False
    reported: int | None = None
    refused: str = ""  # why it refused caps last; "" again when it confirms some

    def adopt(self, issued: dict[str, Rates], whole: dict[str, Rates], at_least: int, now_ns: int) -> None:
        """Believe that these caps are in force until a cut says otherwise."""
        self.issued, self.whole, self.issued_ns = dict(issued), dict(whole), now_ns
        self.adopting, self.gen = at_least, at_least
        # Which split was in force is not stored; a new one is worked out with the next change of a rate.
        self.keep_split = True

    def report(self, throttle_gen: int) -> bool:
        """A cut came; returns whether the caps issued (or adopted) are the ones it ran under."""
        self.reported = throttle_gen
        if self.adopting is not None and max(self.adopting, 1) <= throttle_gen < MAX_GEN:
            self.gen, self.adopting = throttle_gen, None
        return throttle_gen == self.gen and self.adopting is None

    def stray(self, settings: ControlSettings, now_ns: int) -> bool:
        """Whether it has held other caps than it should for too long."""
        if self.reported is None or self.reported == -1 or not self.up:
            return False
        if self.adopting is None and self.reported == self.gen:
            return False
        if not self.issued and self.reported == 0:
            return False  # it holds nothing, and should
        return now_ns - self.issued_ns >= settings.reissue_after_s * 1e9

    def changed(
        self, shares: Mapping[str, Rates], whole: Mapping[str, Rates], settings: ControlSettings, now_ns: int
    ) -> set[str]:
        """Volumes whose caps at this gateway must be sent anew."""
        volumes = shares.keys() | self.issued.keys()
        moved = {
            v
            for v in volumes
            if v not in shares
            or v not in self.issued
            or v not in self.whole
            or whole[v].differs(self.whole[v], SAME_RATIO)
        }
        old_enough = now_ns - self.issued_ns >= settings.resplit_min_s * 1e9
        if not moved and old_enough and not self.keep_split:
            moved = {v for v in volumes if shares[v].differs(self.issued[v], settings.resplit_ratio)}
        return moved

    def send(self, shares: Mapping[str, Rates], whole: Mapping[str, Rates], gen: int, now_ns: int) -> None:
        """These caps go out now."""
        self.issued, self.whole = dict(shares), {v: whole[v] for v in shares}
        self.gen, self.issued_ns, self.adopting, self.keep_split = gen, now_ns, None, False
