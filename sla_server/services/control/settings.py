"""Every number of the control loop, with its reason (SLA-MODEL.md 3).

A ``ControlSettings`` is read once from ``[services.control]`` and does not change while the process runs.
Rates are cost units a second (cost of an I/O = 1 + bytes / 65,536), ratios are 0..1, ``r`` is a latency
percentile divided by its threshold and ``u`` the share of missed I/Os divided by the share allowed (1 =
exactly at the promise).
"""

from __future__ import annotations

from pydantic import Field, model_validator

from pmdaemon.runtime.config import StrictModel


class FeedForwardSettings(StrictModel):
    """When the allowance of a backend is set before a burst that is expected (``feed_forward``)."""

    enabled: bool = True
    """False: the loop only reacts. In mode enforce alone, and only on backends that were in trouble."""
    bin_s: float = Field(default=10.0, ge=1, le=600)
    """Length of a bin of demand; a burst of a bin is worth a prediction, a shorter one ends by itself."""
    left_alone_every: int = Field(default=3, ge=2)
    """Of the bursts expected one of so many is left alone, the first of them: for comparison."""
    proven_every: int = Field(default=8, ge=2)
    """The same once it has helped: a comparison grows old, and each costs what the reaction costs."""
    trial_bursts: int = Field(default=3, ge=1)
    """Bursts with an allowance set before, and two left alone, make a verdict."""
    help_ratio: float = Field(default=0.75, gt=0, lt=1)
    """It helps if it leaves at most this share of the bad windows: less could be chance."""
    evidence_max_s: float = Field(default=604_800.0, gt=0)
    """A burst of longer ago is no evidence: a week, so that one of every night is still compared."""
    most_missed: int = Field(default=2, ge=1)
    """So many expected bursts that do not come, before one is proven again, switch it off."""
    backoff_s: float = Field(default=1800.0, ge=0)
    """How long it stays off the first time; each time after that twice as long."""
    backoff_max_s: float = Field(default=28_800.0, ge=0)
    """Where that doubling ends: eight hours, a working day."""


class ControlSettings(StrictModel):
    """Numbers of the signal, the loop and the proof of actuation."""

    poll_interval_s: float = Field(default=1.0, ge=0.05, le=60)
    """How often gateways are polled; must be what the PMDaemon uses. Ages are counted in it."""
    stale_intervals: float = Field(default=3.0, ge=1)
    """Older cuts are recorded and judged but not used for control: acting on the past oscillates."""

    # The signal.
    window_min_ios: int = Field(default=20, ge=1)
    """Fewer I/Os say nothing of a p95: one miss of 20 is exactly the 5 % allowed."""
    window_max_s: float = Field(default=10.0, gt=0)
    """A slow volume is judged on what it has after this long; waiting more would blind the loop."""
    signal_windows: int = Field(default=3, ge=1)
    """Windows looked at; ceph and blk-iolatency act on 3 to 5 samples."""
    at_risk_windows: int = Field(default=2, ge=1)
    """Of them must be at risk: one bad second is noise, two are a fact."""
    falling_ratio: float = Field(default=0.7, ge=0, lt=1)
    """With r at most this much of that of the window before, a queue drains by itself: wait for the next."""
    starved_weight: float = Field(default=2.0, ge=0)
    """I/Os excused for each that arrived while the gateway was kept waiting: what was under way then is late,
    too, and what waited reaches the backend at once. See ADR 0016."""
    starved_least_ratio: float = Field(default=0.01, ge=0, le=1)
    """A gateway kept waiting for less of a cut is not starved: every process waits a little."""
    starved_most_ratio: float = Field(default=0.5, ge=0, lt=1)
    """At most this share of a cut's I/Os is excused, however starved its gateway: control is never blind."""
    at_risk_u: float = Field(default=0.7, gt=0, le=1)
    """70 % of the allowed misses used: acting only at 1 would always be late by a window."""
    r_on: float = Field(default=0.95, gt=0, le=1)
    """Entry threshold of r while the error budget is untouched."""
    r_on_urgency: float = Field(default=0.075, ge=0)
    """r_on falls by this for each unit of urgency, to 0.80 at urgency 2."""
    clear_u: float = Field(default=0.3, ge=0, le=1)
    """At most this much of the allowance used before anything is given back."""
    clear_r: float = Field(default=0.70, gt=0, le=1)
    """A quarter below the entry threshold: blk-iocost's 75 % hysteresis."""

    # The loop.
    hold_down_min_s: float = Field(default=1.0, ge=0)
    """Never two decreases within a second, however fast the polls are."""
    drain_s: float = Field(default=0.25, ge=0)
    """A backend's queue of 32 at 2 ms empties in 64 ms; four times that. For longer ones:
    falling_ratio, and what is under way (ADR 0075)."""
    drain_max_s: float = Field(default=8.0, ge=0)
    """From a decrease on, what neighbours have at the storage is waited for at most so long: 256 I/Os at
    100 a second, half of which C leaves to them, take 5 s. See ADR 0075."""
    hold_up_s: float = Field(default=5.0, ge=0)
    """How long the victim must be clear before a step up: giving back is less urgent than protecting."""
    hold_up_max_s: float = Field(default=60.0, ge=0)
    """Where the doubling of hold_up on oscillation ends."""
    far_clear_r: float = Field(default=0.5, gt=0, le=1)
    """Below this (and far_clear_u) the last decrease overshot: recover after hold_up_far_s. See ADR 0002."""
    far_clear_u: float = Field(default=0.15, ge=0, le=1)
    """Used with far_clear_r."""
    hold_up_far_s: float = Field(default=1.0, ge=0)
    """Two windows' worth of evidence; the first cut halves C, and half of that was not needed."""
    decrease_min: float = Field(default=0.5, gt=0, lt=1)
    """Largest single decrease: N-fold overload is undone in log2(N) steps."""
    decrease_max: float = Field(default=0.9, gt=0, lt=1)
    """Smallest single decrease: less would drown in noise."""
    increase_divisor: float = Field(default=16.0, ge=1)
    """A probe beyond the remembered ceiling goes up by C0 / 16, as blk-iolatency does."""
    approach_ratio: float = Field(default=0.5, gt=0, le=1)
    """Share of the distance to the parking place that one increase covers. See ADR 0002."""
    first_approach_ratio: float = Field(default=0.7, gt=0, le=1)
    """The same while the ceiling is what was used when nothing was throttled: that is known well."""
    park_ratio: float = Field(default=0.9, gt=0, le=1)
    """Park this far below the C at which risk was last met. See ADR 0002 and 0073."""
    park_r: float = Field(default=0.6, gt=0, le=1)
    """No step up from here on: near saturation 10 % more load doubles a latency percentile. See ADR 0002."""
    probe_after_s: float = Field(default=30.0, gt=0)
    """Parked and clear for so long, the ceiling may be old: probe upwards by one step."""
    release_factor: float = Field(default=1.25, ge=1)
    """Release when C is this much above demand: the cap no longer bites."""
    demand_memory_s: float = Field(default=30.0, ge=0)
    """Demand is the largest of this long, so that a bursting neighbour's pause is no reason to release it."""
    idle_release_s: float = Field(default=5.0, gt=0)
    """A victim without I/O for so long needs no protection (blk-iolatency's 5 s)."""
    oscillation_changes: int = Field(default=4, ge=1)
    """More sign changes of C than this within oscillation_window_s halve the step and double hold_up."""
    oscillation_window_s: float = Field(default=60.0, gt=0)
    """See oscillation_changes."""
    effective_decreases: int = Field(default=4, ge=1)
    """After so many decreases (C at 1/16 to 2/3 of its start) a contention must have shown an effect."""
    effective_ratio: float = Field(default=0.10, ge=0, lt=1)
    """r must have fallen by this much, else the cause is elsewhere."""
    backoff_s: float = Field(default=60.0, ge=0)
    """How long a backend is left alone after that, and the least time between two such events."""
    backoff_max_s: float = Field(default=960.0, ge=0)
    """Where the doubling of that ends, while one attempt after another has no effect."""

    settled_s: float = Field(default=10.0, ge=0)
    """Nobody to slow down must have held this long before it is said: as long as the longest window, so that
    every volume that was there while the windows ran has shown itself in several cuts."""

    # Episodes of violation.
    episode_calm_s: float = Field(default=20.0, ge=0)
    """It must be kept for this long before its violation has ended: several windows, also long ones."""
    episode_calm_max_s: float = Field(default=600.0, ge=0)
    """Where the doubling for violations that come again soon ends; later than this is not soon."""

    # Storage that hangs or fails.
    fault_stall_s: float = Field(default=1.0, gt=0)
    """A backend that completes nothing for so long is no longer busy: at 1 I/O/s it could not be used."""
    fault_calm_s: float = Field(default=5.0, ge=0)
    """A fault has ended once it has not been seen for this long: what was queued has drained by then."""

    # Sharing.
    small_share_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Volumes below this share of the backend's cost are left alone: throttling them gains nothing."""
    demand_factor: float = Field(default=1.25, ge=1)
    """Room above the present use of a volume that is not queueing (blk-iocost's donation rule)."""
    demand_slack_ratio: float = Field(default=0.02, ge=0)
    """And this share of the backend's cost, so that a nearly idle volume can start."""
    recent_share_ratio: float = Field(default=0.8, ge=0, le=1)
    """Of a cap goes to a volume's gateways by recent use, the rest equally, so that use can move."""
    resplit_min_s: float = Field(default=5.0, ge=0)
    """Least time between two changes of shares alone: each one makes the loop wait for new evidence."""
    resplit_ratio: float = Field(default=0.10, ge=0)
    """Shares that differ less are left as they are."""
    default_floor_iops: float = Field(default=50.0, ge=0)
    """Floor of a volume without an agreement (DESIGN.md 4, Names)."""

    # Actuation.
    lease_s: float = Field(default=30.0, gt=0)
    """A gateway that hears nothing for so long falls back to its static policy."""
    confirm_limit_s: float = Field(default=5.0, gt=0)
    """Five polls; a cap not confirmed by then is reported and the loop goes on without that gateway."""
    reissue_after_s: float = Field(default=3.0, gt=0)
    """A gateway that reports another generation for so long is sent its caps again."""
    seen_tolerance_ratio: float = Field(default=0.15, ge=0)
    """Measured rate may exceed the cap by this: bucket depth (20 ms) and the edges of a 1 s cut."""
    not_effective_cuts: int = Field(default=3, ge=1)
    """Cuts in a row above the cap that they report before it is called not effective; no demand, no count."""

    feed_forward: FeedForwardSettings = Field(default_factory=FeedForwardSettings)
    """Before a burst that is expected."""

    @model_validator(mode="after")
    def _consistent(self) -> ControlSettings:
        if self.at_risk_windows > self.signal_windows:
            raise ValueError("at_risk_windows must not be above signal_windows, or nothing is ever at risk")
        if self.decrease_min > self.decrease_max:
            raise ValueError("decrease_min must not be above decrease_max")
        if self.clear_r > self.r_on - 2 * self.r_on_urgency:
            raise ValueError(
                "clear_r must stay below r_on at urgency 2 (r_on - 2 * r_on_urgency): no deadband"
            )
        return self

    @property
    def hold_down_s(self) -> float:
        """Least time between two decreases: max(1 s, 2 polls + drain)."""
        return max(self.hold_down_min_s, 2 * self.poll_interval_s + self.drain_s)

    def hold_down_for(self, latency_s: float) -> float:
        """The same for a promise whose I/Os take so long.

        At polls below a second a queue has not drained by then: what it holds takes a latency or two. No
        longer than at polls of a second.
        """
        if self.poll_interval_s >= 1:
            return self.hold_down_s
        most_s = 2 + self.drain_s
        return max(self.hold_down_s, min(2 * self.poll_interval_s + 2 * latency_s, most_s))

    @property
    def stale_s(self) -> float:
        """Age beyond which a cut is of no use for control."""
        return self.stale_intervals * self.poll_interval_s

    @property
    def silent_s(self) -> float:
        """Age of the newest cut from which on there is no data."""
        return max(self.stale_s, self.poll_interval_s * 3)
