r"""Throttles, and the caps that each gateway holds because of them.

A throttle's life:

    requested --> sent --> confirmed --> seen          a change of its rate starts again at requested
        \                     ^             \
         `--> refused         |              `--> released | expired
    observed (mode observe): only written down

Confirmed: every gateway that carries the volume acknowledged the generation, or reported it in a cut. Seen:
the rate measured in a cut made wholly under it is at most the cap (and a tolerance). A throttle that is not
confirmed within ``confirm_limit_s``, or is exceeded in three confirmed cuts with none between that shows it
held, is not effective; that is said once. A cut is compared with the caps of the generation that it reports,
also where newer ones are on their way: caps that change with each poll hide nothing.

A gateway holds one complete set of caps, under a generation. Generations are numbered over all gateways by
one counter, so that a throttle's row needs one number. The counter rises with the wall clock and with what
this server issued, never with what a gateway reports: an odd number harms the gateway that reports it and no
other. A gateway reports in each cut the generation it held during the whole of it:

    reported == issued      good
    -1                      it changed within that cut: wait for the next; of a gateway that acknowledged the
                            newest caps long ago (its planes hold different ones) it proves no cap, but is
                            compared with it
    anything else           it restarted, its lease ran out, or a message was lost: after
                            ``reissue_after_s`` the complete set is sent again under a new generation; also
                            an empty one, to a gateway that holds caps unknown here. Each repetition waits
                            twice as long, and all longer than the last confirmation took: over a slow link
                            caps that are replaced before they are confirmed would never be
    after our own restart   nothing is sent; what the gateway holds is taken over (``adopt``) as soon as a
                            cut shows a generation that can be it, and only otherwise sent again

Plain state, no clock. Changed only by the policy manager.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pmdaemon.runtime.backoff import doubled
from pmdaemon.runtime.clock import STEP_US
from pmdaemon.wire.rates import DEFAULT_BURST_S, Rates
from sla_server.explanation import words
from sla_server.services.control.client_use import ClientUse
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.targets import group_of, target_of
from sla_server.services.control.usage import Usage

_NAMESPACE: Final = uuid.UUID("5a1f6d0e-0f43-5d0c-9a3c-6f0c1c3f7b11")
MAX_GEN: Final = 1 << 53
"""Generations, which are microseconds of the wall clock when issued, are below this (the year 2255)."""

SAME_RATIO: Final = 0.01
"""Rates that differ by less are the same: an enforcer is no more exact."""


def exceeds(
    rates: Rates, use: Usage | ClientUse, duration_s: float, tolerance: float, let_in: float = 1.0
) -> bool:
    """Whether the newest cut used more than these rates allow; one I/O of slack for the cut's edges.

    ``let_in``: what was sent to the storage in the cut, of what was completed in it.
    """
    burst_s, least_s = rates.burst_s or DEFAULT_BURST_S, DEFAULT_BURST_S
    checks = (
        (rates.cost_per_s, use.last_cost_per_s, burst_s),
        (rates.ops_per_s, use.last_ops_per_s, burst_s),
        (rates.bytes_per_s, use.last_bytes_per_s, burst_s),
        (rates.peak_ops_per_s, use.last_ops_per_s, least_s),
    )
    one_io = 1 / duration_s
    return any(
        cap is not None
        and used * let_in
        > cap * (1 + at_once_s / duration_s + tolerance) + one_io * (used / max(use.last_ops_per_s, 1e-9))
        for cap, used, at_once_s in checks
    )


def _tells(rates: Rates, use: Usage | ClientUse) -> bool:
    """Whether a cut within these rates had the demand that shows that they are held."""
    pairs = (
        (rates.cost_per_s, use.last_cost_per_s),
        (rates.ops_per_s, use.last_ops_per_s),
        (rates.bytes_per_s, use.last_bytes_per_s),
        (rates.peak_ops_per_s, use.last_ops_per_s),
    )
    return use.held > 0 or any(cap is not None and used >= TELLS_RATIO * cap for cap, used in pairs)


def new_id(source: str, volume: str, unix_us: int) -> str:
    """throttle_id of a throttle set by the controller: the same inputs give the same id."""
    return str(uuid.uuid5(_NAMESPACE, f"{source}\0{volume}\0{unix_us}"))


@dataclass(frozen=True, slots=True)
class LoopMemory:
    """What the loop of a backend has learned, kept with each of its throttles for the process after us.

    Attributes:
        start: cost rate of the managed volumes when they were first slowed down (C0).
        ceiling: lowest cost rate at which risk was met recently.
    """

    start: float
    ceiling: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> LoopMemory | None:
        """As a throttle's row has it, if it has."""
        start, ceiling = row.get("loop_start"), row.get("loop_ceiling")
        return None if start is None or ceiling is None else cls(start, ceiling)


def _weights(members: Any) -> dict[str, float]:
    """Weights of a group's volumes as a row has them, JSON or decoded; none for a throttle of a volume."""
    decoded = json.loads(members) if isinstance(members, str) and members else members or {}
    return {volume: float(weight) for volume, weight in decoded.items()}


ROUND_TRIPS: Final = 1.5
"""A confirmation that takes this many times as long as the last one is missing."""

TELLS_RATIO: Final = 0.5
"""A cut that used less of its cap and held nothing back says nothing of the enforcer: it had no demand."""
QUIET_CUTS: Final = 60
"""So many of those in a row end the count of cuts above the cap: they have no common cause any more."""
KEPT_GENS: Final = 16
"""Generations of a gateway whose caps are known: with one a tick, those of four seconds."""
UNSHOWN_CUTS: Final = 12
"""Cuts that say -1, one after another, of a gateway whose planes differ for good, and do not just begin."""
MOST_DENIED: Final = 2
"""Caps sent again so often, and acknowledged, that its cuts deny: it does not hold what it says."""

LEAST: Final = Rates(ops_per_s=1.0, bytes_per_s=4096.0, cost_per_s=1.0)
"""Never zero: a volume that does not move at all is an outage, not a throttle."""


@dataclass(slots=True)
class Throttle:
    """A row of table ``throttles`` and what its proof still waits for.

    Attributes:
        client: of the volume, if only its use is capped; without a volume a whole client.
        group, weights: name of a group that is capped, and the weight of each volume; ``volume`` is "" then.
            Of a whole client ``weights`` has the volumes that it was seen to use.
        waiting: gateway_id to the generation it has still to confirm.
        unseen: gateways whose measured rate has still to show the cap.
        loop: of layer control, what its backend's loop has learned.
        asked: gateways with something to confirm, each with when the oldest of it was sent, on the monotonic
            clock, and the least generation that would be progress.
        over_cuts: gateway_id to confirmed cuts above the cap, with none between that says it holds.
        quiet_cuts: of those gateways, cuts that say nothing, one after another.
        under_way: gateway_id to its I/Os at the storage when its last cut ended, also one that was not wholly
            under the cap. What was sent there before completes under it: a deep queue empties for seconds.
        late_ios, longest_hold_us: I/Os that its gateways let through later than their ``max_hold_s``, since
            it was set or this process started, and the longest delay; also of one that is still held.
        expires_ns: when it expires, on the monotonic clock; None until ``expired`` was asked first.
        noted, noted_rates: its newest row of ``decisions``, as far as this process wrote it, and the rates
            that this row has.
        reported_late, reported_over: kinds of failure reported already; withdrawn by a confirmation, or a
            rate within the cap.
    """

    throttle_id: str
    volume: str
    backend: str
    source: str
    rates: Rates
    reason: str
    text: str
    victim: str = ""
    who: str = ""
    state: str = "requested"
    gen: int | None = None
    requested_us: int = 0
    confirmed_us: int | None = None
    seen_us: int | None = None
    released_us: int | None = None
    expires_us: int | None = None
    expires_ns: int | None = None
    issued_ns: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    over_cuts: dict[str, int] = field(default_factory=dict)
    quiet_cuts: dict[str, int] = field(default_factory=dict)
    under_way: dict[str, int] = field(default_factory=dict)
    loop: LoopMemory | None = None
    late_ios: int = 0
    longest_hold_us: int = 0
    noted: dict[str, Any] | None = None
    noted_rates: Rates | None = None
    reported_late: bool = False
    reported_over: bool = False
    client: str = ""
    group: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Throttle:
        """A throttle as its row has it; of ``decisions``, too, a row was written with these rates."""
        names = ("ops_per_s", "bytes_per_s", "cost_per_s", "burst_s", "peak_ops_per_s")
        rates = Rates(*(row.get(name) for name in names))
        return cls(
            throttle_id=row["throttle_id"],
            volume=row["volume"],
            backend=row["backend"],
            source=row["source"],
            rates=rates,
            reason=row["reason"],
            text=row["text"],
            victim=row.get("victim") or "",
            who=row.get("who") or "",
            state=row["state"],
            gen=row.get("gen"),
            requested_us=row["requested_us"],
            confirmed_us=row.get("confirmed_us"),
            seen_us=row.get("seen_us"),
            expires_us=row.get("expires_us"),
            loop=LoopMemory.of(row),
            noted_rates=rates,
            client=row.get("client") or "",
            group=row.get("group_name") or "",
            weights=_weights(row.get("members")),
        )

    @property
    def target(self) -> str:
        """What it caps: the volume, one client of it, a whole client, or the group (``targets``)."""
        return target_of(self.volume, self.client, self.group)

    @property
    def group_key(self) -> str:
        """Its group as ``groups.Groups`` has it, that of a whole client too; "" for one volume's."""
        return group_of(self.target)

    @property
    def element(self) -> tuple[str, str]:
        """Kind and name of what its events are about."""
        if self.group:
            return "group", self.group
        return ("volume", self.volume) if self.volume else ("client", self.client)

    @property
    def volumes(self) -> Iterable[str]:
        """Whose I/O it slows down."""
        return self.weights if self.group_key else (self.volume,)

    def announced(self, held: Callable[[Throttle], Rates]) -> str:
        """What an event says when it is set; ``held``: what the rates of an operator's come to."""
        if self.source != "manual":
            return self.text
        who = f" by {self.who}" if self.who else ""
        return f"throttled by hand to {words.rates(held(self).limits())}{who} ({self.text})"

    def row(self) -> dict[str, Any]:
        """The row as docs/formats/sql.md has it."""
        return {
            "throttle_id": self.throttle_id,
            "volume": self.volume,
            "client": self.client,
            "group_name": self.group,
            "members": json.dumps(dict(self.weights)) if self.group_key else "",
            "backend": self.backend,
            "source": self.source,
            "cost_per_s": self.rates.cost_per_s,
            "ops_per_s": self.rates.ops_per_s,
            "bytes_per_s": self.rates.bytes_per_s,
            "burst_s": self.rates.burst_s,
            "peak_ops_per_s": self.rates.peak_ops_per_s,
            "reason": self.reason,
            "text": self.text,
            "victim": self.victim,
            "who": self.who,
            "state": self.state,
            "gen": self.gen,
            "requested_us": self.requested_us,
            "confirmed_us": self.confirmed_us,
            "seen_us": self.seen_us,
            "released_us": self.released_us,
            "expires_us": self.expires_us,
            "loop_start": self.loop.start if self.loop is not None else None,
            "loop_ceiling": self.loop.ceiling if self.loop is not None else None,
        }

    def expired(self, now_ns: int, unix_us: int) -> bool:
        """Whether its time has passed; it keeps its length when the clock is set, ``expires_us`` follows.

        Of a throttle from SQL the wall clock says how much is left, once.
        """
        if self.expires_us is None:
            return False
        if self.expires_ns is None:
            self.expires_ns = now_ns + (self.expires_us - unix_us) * 1000
        left_us = (self.expires_ns - now_ns) // 1000
        if abs(unix_us + left_us - self.expires_us) >= STEP_US:
            self.expires_us = unix_us + left_us
        return left_us <= 0

    def issued(self, gateway_id: str, gen: int, now_ns: int) -> None:
        """Caps of this generation go out to a gateway."""
        if self.gen != gen:
            self.state, self.gen, self.issued_ns = "requested", gen, now_ns
            self.confirmed_us = self.seen_us = None
        self.wait_for(gateway_id, gen, now_ns)
        # over_cuts goes on: the loop changes a cap that has no effect before three cuts are over.

    def wait_for(self, gateway_id: str, gen: int, now_ns: int) -> None:
        """A gateway has to confirm this generation, and to show the cap in its cuts."""
        self.waiting[gateway_id] = gen
        self.asked.setdefault(gateway_id, (now_ns, gen))
        self.unseen.add(gateway_id)

    def follow(self, before: Throttle) -> None:
        """It takes the place of another one: of the same target, what its gateways have to prove stays."""
        if before.target != self.target:
            return
        self.waiting, self.asked, self.unseen = before.waiting, before.asked, before.unseen
        self.issued_ns = before.issued_ns
        self.over_cuts, self.quiet_cuts, self.under_way = (
            before.over_cuts,
            before.quiet_cuts,
            before.under_way,
        )
        self.reported_late, self.reported_over = before.reported_late, before.reported_over

    def join(self, gateways: Mapping[str, GatewayCaps], now_ns: int) -> None:
        """Gateways that hold the same caps already, for other throttles, prove it by their next cuts."""
        for gateway_id, gateway in gateways.items() if self.gen is None else ():
            if gateway.up and self.target in gateway.issued:
                self.issued(gateway_id, gateway.gen, now_ns)

    def confirmed(self, gateway_id: str, gen: int, unix_us: int) -> bool:
        """A gateway holds this generation; returns whether the state changed."""
        wanted = self.waiting.get(gateway_id)
        if wanted is None:
            return False
        if gen < wanted:
            if gen >= self.asked[gateway_id][1]:  # it is only slow: each change is confirmed after the next
                self.asked[gateway_id] = self.issued_ns, gen + 1
            return False
        del self.waiting[gateway_id], self.asked[gateway_id]
        self.reported_late = self.reported_late and bool(self.waiting)
        if self.waiting or self.state not in ("requested", "sent", "refused"):
            return False
        self.state, self.confirmed_us = "confirmed", unix_us
        return True

    def end(self, state: str, text: str, unix_us: int) -> None:
        """It has ended: released or expired.

        What it was set for, by an operator or in the loop's last step, stays, with how it ended behind it;
        its decision and its event have the reason of the end.
        """
        self.state, self.released_us = state, unix_us
        self.text = f"{self.text}; {text}" if self.text else text

    def forget(self, gateway_id: str) -> None:
        """The gateway is gone; it has nothing to prove any more."""
        for known in (self.waiting, self.asked, self.over_cuts, self.quiet_cuts, self.under_way):
            known.pop(gateway_id, None)
        self.unseen.discard(gateway_id)

    def measured(
        self,
        gateway_id: str,
        share: Rates,
        use: Usage | ClientUse,
        duration_s: float,
        settings: ControlSettings,
        unix_us: int,
        *,
        is_proof: bool = True,
    ) -> bool:
        """A cut made wholly under the cap came; returns whether the state changed to seen.

        ``is_proof``: the gateway reported the newest caps in it, and not older ones.
        """
        before, self.under_way[gateway_id] = self.under_way.get(gateway_id), use.inflight
        if exceeds(share, use, duration_s, settings.seen_tolerance_ratio):
            completed = max(use.last_ops_per_s * duration_s, 1.0)
            let_in = 0.0 if before is None else max(1 + (use.inflight - before) / completed, 0.0)
            if exceeds(share, use, duration_s, settings.seen_tolerance_ratio, let_in):
                self.over_cuts[gateway_id] = self.over_cuts.get(gateway_id, 0) + 1
                self.quiet_cuts.pop(gateway_id, None)
            return False  # else neither proof nor its absence
        if self.over_cuts.get(gateway_id) and not _tells(share, use):
            self.quiet_cuts[gateway_id] = self.quiet_cuts.get(gateway_id, 0) + 1
            if self.quiet_cuts[gateway_id] < QUIET_CUTS:
                return False
        self.quiet_cuts.pop(gateway_id, None)
        self.over_cuts[gateway_id] = 0
        self.reported_over = self.reported_over and any(self.over_cuts.values())
        if gateway_id in self.waiting or not is_proof:
            return False
        self.unseen.discard(gateway_id)
        if self.unseen or self.state != "confirmed":
            return False
        self.state, self.seen_us = "seen", unix_us
        return True

    @property
    def is_unproven(self) -> bool:
        """Whether ``failure`` may have something to say."""
        return bool(self.waiting) or any(self.over_cuts.values())

    def failure(self, settings: ControlSettings, now_ns: int) -> str:
        """Why it is not effective, or ""; says each kind of failure once."""
        exceeded = sorted(g for g, cuts in self.over_cuts.items() if cuts >= settings.not_effective_cuts)
        if exceeded and not self.reported_over:
            self.reported_over = True
            at = ", ".join(exceeded)
            return f"measured above the cap in {settings.not_effective_cuts} cuts at gateway {at}"
        limit_ns = now_ns - settings.confirm_limit_s * 1e9
        late = sorted(g for g, (asked_ns, _) in self.asked.items() if asked_ns < limit_ns)
        if late and not self.reported_late:
            self.reported_late = True
            return f"not confirmed within {settings.confirm_limit_s:g} s by gateway {', '.join(late)}"
        return ""


@dataclass(slots=True)
class GatewayCaps:
    """One gateway as a receiver of caps.

    Attributes:
        issued: target to its rates at this gateway, as last sent (or adopted).
        totals: target to its rates over all gateways when that was sent.
        adopting: lowest generation that may be the caps found in force after our restart; None when settled.
        sent: ``issued`` of the newest generations; ``acknowledged``: the newest one that it says it holds.
        unshown: cuts since then, one after another, that were not made under the newest caps as they say.
    """

    gateway_id: str
    up: bool = True
    gen: int = 0
    issued: dict[str, Rates] = field(default_factory=dict)
    totals: dict[str, Rates] = field(default_factory=dict)
    issued_ns: int = 0
    adopting: int | None = None
    keep_split: bool = False
    lost_ns: int = 0  # when it was lost, while it is not up
    reported: int | None = None
    sent: dict[int, dict[str, Rates]] = field(default_factory=dict)
    acknowledged: int = 0
    unshown: int = 0
    repeats: int = 0  # sent again since the last confirmation
    round_trip_ns: int = 0  # how long the last confirmation took
    refused: str = ""  # why it refused caps last; "" again when it confirms some
    lacks_caps: bool = False  # not all of its caps fit into a message
    members: dict[str, Mapping[str, float]] = field(default_factory=dict)  # of each group issued

    @property
    def holds_its_caps(self) -> bool:
        """It is up, and its newest cut was made wholly under what it should hold."""
        if not self.up or self.adopting is not None:
            return False
        return self.reported == self.gen or (not self.issued and self.reported == 0)

    def adopt(self, issued: dict[str, Rates], totals: dict[str, Rates], at_least: int, now_ns: int) -> None:
        """Believe that these caps are in force until a cut says otherwise."""
        self.issued, self.totals, self.issued_ns = dict(issued), dict(totals), now_ns
        self.adopting, self.gen, self.sent = at_least, at_least, {}
        # Which split was in force is not stored; a new one is worked out with the next change of a rate.
        self.keep_split = True

    def report(self, throttle_gen: int, now_ns: int | None = None) -> bool:
        """A cut came; returns whether it ran under the caps issued (or adopted)."""
        is_first, self.reported = throttle_gen != self.reported, throttle_gen
        if self.adopting is not None and max(self.adopting, 1) <= throttle_gen < MAX_GEN:
            self.gen, self.adopting = throttle_gen, None
        if throttle_gen != self.gen or self.adopting is not None:
            self.unshown = self.unshown + 1 if self.acknowledged == self.gen else 0
            return False
        self.repeats = self.unshown = 0
        if is_first and now_ns is not None:
            self.round_trip_ns = now_ns - self.issued_ns
        return True

    def knows(self, gen: int) -> bool:
        """Whether its caps of this generation are known."""
        return self.adopting is None and (gen == self.gen or gen in self.sent)

    def held_under(self, gen: int) -> Mapping[str, Rates]:
        """Caps that should have held in the whole of its newest cut, which reports this; none if unknown."""
        if self.adopting is not None:
            return {}
        is_denied = self.unshown > (UNSHOWN_CUTS if gen == -1 else MOST_DENIED)
        is_denied &= gen == -1 or self.repeats >= MOST_DENIED
        if gen == self.gen or (is_denied and gen not in self.sent):
            return self.issued
        return self.sent.get(gen, {})

    def held_ratio(self, volume: str, total: Rates, lease_s: float, now_ns: int) -> float:
        """Share of a volume's cap ``total`` that it goes on using after it was lost, until its lease ends."""
        share = self.issued.get(volume)
        if self.up or share is None or now_ns - self.lost_ns >= lease_s * 1e9:
            return 0.0
        pairs = (
            (share.cost_per_s, total.cost_per_s),
            (share.ops_per_s, total.ops_per_s),
            (share.bytes_per_s, total.bytes_per_s),
        )
        return max((held / of for held, of in pairs if held is not None and of is not None), default=0.0)

    def stray(self, settings: ControlSettings, now_ns: int) -> bool:
        """Whether it has held other caps than it should for too long."""
        if self.reported is None or self.reported == -1 or not self.up:
            return False
        if self.adopting is None and self.reported == self.gen:
            return False
        if not self.issued and self.reported == 0:
            return False  # it holds nothing, and should
        wait_ns = max(settings.reissue_after_s * 1e9, ROUND_TRIPS * self.round_trip_ns)
        most_ns = max(settings.lease_s, settings.reissue_after_s) * 1e9
        return now_ns - self.issued_ns >= doubled(wait_ns, self.repeats, most_ns)

    def changed(
        self,
        shares: Mapping[str, Rates],
        totals: Mapping[str, Rates],
        settings: ControlSettings,
        now_ns: int,
    ) -> set[str]:
        """Volumes whose caps at this gateway must be sent again."""
        volumes = shares.keys() | self.issued.keys()
        moved = {
            v
            for v in volumes
            if v not in shares
            or v not in self.issued
            or v not in self.totals
            or totals[v].differs(self.totals[v], SAME_RATIO)
        }
        old_enough = now_ns - self.issued_ns >= settings.resplit_min_s * 1e9
        if not moved and old_enough and not self.keep_split:
            moved = {v for v in volumes if shares[v].differs(self.issued[v], settings.resplit_ratio)}
        return moved

    def send(
        self,
        shares: Mapping[str, Rates],
        totals: Mapping[str, Rates],
        gen: int,
        now_ns: int,
        *,
        is_repeat: bool = False,
    ) -> None:
        """These caps go out now; ``is_repeat``: only because the last ones were not confirmed."""
        self.issued, self.totals = dict(shares), {v: totals[v] for v in shares}
        self.sent[gen] = self.issued
        if len(self.sent) > KEPT_GENS:
            del self.sent[next(iter(self.sent))]
        self.gen, self.issued_ns, self.adopting, self.keep_split = gen, now_ns, None, False
        self.repeats += is_repeat
