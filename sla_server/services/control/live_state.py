"""The live state of a promise, with hysteresis, and the episodes it opens and closes.

    no-data       no cut for ``stale_intervals`` polls, or none yet; or not of all: a gateway in scope is
                  silent, or a data plane has stopped, and what the others measure breaks nothing
    idle          no I/O for ``idle_release_s``, and what was before is in windows that have closed
    out-of-curve  demand above the curve: nothing is promised, but that storage does not hang or fail
    violating     2 of 3 windows with u > 1, or two slices one behind the other that break the promise as they
                  are judged (``slice_sums``), until no window has u > 1 and all together are below
                  ``at_risk_u``, or the promise goes idle or out of its curve
    at-risk       2 of 3 windows at risk; or the only one that there is has u > 1
    not-applicable  the I/Os are not such as the promise is about: too few, too large, too many writes
    excluded      in maintenance or outside service hours: nothing is promised
    ok            otherwise

All windows count, also those that ran under older caps: it says what customers see, not what the loop
may learn.

An *episode* opens with the state violating, and closes when the promise has not been violating for
``episode_calm_s`` and each of its gateways has spoken since then: a noisy promise is one episode, not a
hundred. One that opens again soon after must be calm for twice as long, up to ``episode_calm_max_s``. No data
neither opens nor closes an episode.
``services.episodes`` stores the episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pmdaemon.runtime.backoff import doubled
from sla_server.agreements.promise import Promise
from sla_server.agreements.verdicts import DELIVERED_RATIO
from sla_server.services.control.decisions import RaiseEvent
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import SignalRow
from sla_server.services.control.slice_sums import SliceFigures
from sla_server.services.control.verdicts import NOTHING, Figures, Signal

_WHAT: Final = {
    "mean_latency": "mean of one kind of I/O",
    "iops": "rate that was asked for",
    "throughput": "rate that was asked for",
    "availability": "outage",
}
_CLOSED: Final = {"ok": "is kept again", "at-risk": "is no longer violated, though still at risk"}
_CLOSED_OTHERWISE: Final = "is no longer violated"
"""What the end of a violation says, by the state that it ends in: as the page calls it."""


@dataclass(slots=True)
class LiveState:
    """State of one promise; ``row`` has its windows over all backends, None while it has no streams.

    Attributes:
        violating: an episode is open.
        calm_since_ns: since when it is open and the promise not violated; None if it is, or is not known.
        excluded: why nothing is promised at present, "" if it is.
        flaps: episodes that opened soon after the one before, in a row.
    """

    settings: ControlSettings
    promise: Promise
    row: SignalRow | None = None
    state: str = "no-data"
    violating: bool = False
    calm_since_ns: int | None = None
    closed_ns: int | None = None
    flaps: int = 0
    excluded: str = ""

    @property
    def closes_ns(self) -> int | None:
        """When the open episode closes if all stays calm; None while it does not."""
        if self.calm_since_ns is None:
            return None
        s = self.settings
        calm_s = doubled(s.episode_calm_s, self.flaps, s.episode_calm_max_s)
        return self.calm_since_ns + round(calm_s * 1e9)

    @property
    def shows_violation(self) -> bool:
        """Whether it is shown as violated until its windows say otherwise; a gap in the data says nothing."""
        return self.state == "violating" or (self.state == "no-data" and self.violating)

    @property
    def name(self) -> str:
        """agreement/objective."""
        return "/".join(self.promise.key)

    @property
    def what(self) -> str:
        """The figure that is promised, in words."""
        if self.promise.metric == "mean_latency" and self.promise.io == "any":
            return "latency"
        return _WHAT.get(self.promise.metric, "latency percentile")

    @property
    def signal(self) -> Signal:
        """What the windows say."""
        return NOTHING if self.row is None else self.row.signal()

    def why_no_data(self, is_measured: bool, silent: str = "") -> str:
        """Why there is no data, or nothing is promised, for people; "" in any other state.

        Args:
            is_measured: whether a stream in scope is seen by a source that measures what is promised.
            silent: which data plane has stopped, or which gateway is silent, in words; "" if none is.
        """
        if self.state == "excluded":
            return self.excluded
        if self.state != "no-data":
            return ""
        if self.row is None:
            return "no client has used its volumes yet"
        if not is_measured:
            return f"its volumes are counted beside the I/O path: no {self.what} can be measured there"
        if silent:
            return silent
        if self.row.last_piece_ns is None:
            with_what = " with latencies" if self.promise.metric == "latency" else ""
            return f"no statistics{with_what} have come yet"
        limit_s = self.settings.silent_s
        return f"no window with I/O that counts, or no statistics for {limit_s:g} s"

    def update(self, now_ns: int) -> RaiseEvent | None:
        """Follow the windows; returns the event of a violation that opened or closed."""
        # Read first: an idle row is emptied next, and the event has the figures of before.
        signal = self.signal
        self.state = self._measured(signal, now_ns)
        if self.state == "violating":
            self.calm_since_ns = None
            if not self.violating:
                return self._open(signal, now_ns)
        elif self.violating:
            if self.state == "no-data":
                self.calm_since_ns = None
            elif self.calm_since_ns is None:
                self.calm_since_ns = now_ns
            if self.closes_ns is not None and now_ns >= self.closes_ns and self._is_proven_calm():
                self.violating, self.closed_ns, self.calm_since_ns = False, now_ns, None
                return self._closed(signal)
        return None

    def _is_proven_calm(self) -> bool:
        """Whether all gateways have spoken since it is calm: one may be gone, and not silent for long."""
        since_ns = self.calm_since_ns
        if self.row is None or since_ns is None or self.state == "excluded":
            return True
        return self.row.spoke_since(since_ns)

    def _open(self, signal: Signal, now_ns: int) -> RaiseEvent:
        soon_ns = self.settings.episode_calm_max_s * 1e9
        is_flap = self.closed_ns is not None and now_ns - self.closed_ns < soon_ns
        self.violating, self.flaps = True, self.flaps + 1 if is_flap else 0
        return self._opened(signal)

    def _measured(self, signal: Signal, now_ns: int) -> str:
        was_violating = self.shows_violation
        last_ns = None if self.row is None else self.row.last_piece_ns
        if self.excluded:
            return "excluded"
        if self.row is None or last_ns is None or now_ns - last_ns > self.settings.silent_s * 1e9:
            return "no-data"
        partial = self.row.is_partial(now_ns)
        if self.row.idle:
            self.row.rest()
            return "no-data" if partial else "idle"
        if not signal.windows:
            return "violating" if was_violating else "no-data"
        enough = self.settings.at_risk_windows
        if signal.over >= enough or (was_violating and signal.over):  # no clause excuses that
            return "violating"
        if self.row.breaks_slices() is not None:
            return "violating"
        if was_violating and signal.u >= signal.near_u and not signal.excuse:
            return "violating"
        if partial:
            return "no-data"
        if signal.excuse:
            return signal.excuse
        is_alone = signal.over > 0 and signal.windows < enough  # all that is known is no proof of good
        return "at-risk" if signal.risky >= enough or is_alone else "ok"

    def _opened(self, signal: Signal) -> RaiseEvent:
        """Its figures are of the windows that were over: all together may have kept the promise.

        Or of two slices: no window may have shown it.
        """
        slices = self.row.breaks_slices() if self.row is not None else None
        if signal.over < self.settings.at_risk_windows and slices is not None:
            return self._opened_by(slices, signal)
        within = f"in {signal.over} of the last {signal.windows} windows, "
        text = f"{self.name} is violated: {within}{self._figures_text(signal, signal.of_over)}"
        details = {**self._details(signal, signal.of_over), "windows_over": signal.over}
        return RaiseEvent("violation-opened", "critical", "sla", self.name, text, details)

    def _opened_by(self, slices: SliceFigures, signal: Signal) -> RaiseEvent:
        what = f"{slices.failed_ratio:.2%} of the I/Os failed, " if slices.failed_ratio else ""
        if slices.stuck:
            what += f"{slices.stuck} I/Os did not complete though others did, "
        limit_us = slices.threshold_us if self.promise.curve else None
        latency_us = 0.0
        if self.promise.metric == "mean_latency":
            latency_us = slices.u * slices.threshold_us
            what += f"mean latency {latency_us / 1000:.1f} ms of {slices.threshold_us / 1000:g} ms allowed, "
        elif self.promise.metric != "availability":
            what += f"{slices.u:.2f} times the misses allowed, "
        text = (
            f"{self.name} is violated: in this slice of {self.promise.slice_s} s and the one before it {what}"
            f"{slices.offered_iops:.0f} IOPS offered"
        )
        figures = Figures(slices.u, latency_us, slices.offered_iops)
        failed = round(slices.failed_ratio, 4)
        more: dict[str, Any] = {"threshold_us": limit_us, "failed_ratio": failed, "slices_over": 2}
        if slices.stuck:
            more["stuck"] = slices.stuck
        if not latency_us:
            more["latency_us"] = None  # slices count misses: their percentile is not known here
        details = {**self._details(signal, figures), "windows_over": signal.over, **more}
        return RaiseEvent("violation-opened", "critical", "sla", self.name, text, details)

    def _closed(self, signal: Signal) -> RaiseEvent:
        """Of one that is idle or above its curve, figures would speak of what is promised no more."""
        figures = Figures(signal.u, signal.latency_us, signal.offered_iops)
        if self.state == "idle":
            why = "there is no I/O any more"
        elif self.state == "excluded":
            why = f"nothing is promised at present: {self.excluded}"
        elif self.state == "not-applicable":
            why = "its I/Os are not such as the promise is about (applicability)"
        elif self.state == "out-of-curve":
            why = f"{signal.offered_iops:.0f} IOPS offered are more than its curve promises for"
        else:
            why = self._figures_text(signal, figures)
        text = f"{self.name} {_CLOSED.get(self.state, _CLOSED_OTHERWISE)}: {why}"
        return RaiseEvent("violation-closed", "info", "sla", self.name, text, self._details(signal, figures))

    def _figures_text(self, signal: Signal, figures: Figures) -> str:
        limit_ms = (signal.threshold_us or 0) / 1000
        what = ""
        if signal.stalled:
            stall_s = signal.stall_us / 1e6
            what = f"no I/O completed for {stall_s:.1f} s though some was outstanding, "
            if signal.is_partial:
                what = f"some I/O did not complete for {stall_s:.1f} s though other I/O did, "
        if signal.failed_ratio:
            what += f"{signal.failed_ratio:.0%} of the I/Os failed, "
        offered = f"{figures.offered_iops:.0f} IOPS offered"
        if self.promise.promised:
            most = 1 - DELIVERED_RATIO
            short = f"{min(figures.u * most, 1.0):.1%} of what was asked for, as far as it was promised, "
            return f"{what}{short}was not delivered, {most:.0%} allowed, {offered}"
        if self.promise.metric == "mean_latency":
            mean_ms = figures.latency_us / 1000
            return f"{what}mean latency {mean_ms:.1f} ms of {limit_ms:g} ms allowed, {offered}"
        if self.promise.metric == "availability":
            stall = f"no I/O completed for {signal.stall_us / 1e6:.1f} s of {limit_ms / 1000:g} s allowed"
            failed = f"{signal.failed_ratio:.1%} of the I/Os failed"
            return f"{stall}, {failed}, {offered}"
        return what + (
            f"{figures.u:.2f} times the misses allowed, p{self.promise.percentile:g} "
            f"{figures.latency_us / 1000:.1f} ms of {limit_ms:g} ms allowed, "
            f"{offered}"
        )

    def _details(self, signal: Signal, figures: Figures) -> dict[str, Any]:
        return {
            "sla": self.promise.sla,
            "objective": self.promise.objective,
            "u": round(figures.u, 4),
            "latency_us": round(figures.latency_us),
            "threshold_us": signal.threshold_us if self.promise.curve else None,
            "offered_iops": round(figures.offered_iops, 1),
            "windows": signal.windows,
            "windows_stalled": signal.stalled,
            "failed_ratio": round(signal.failed_ratio, 4),
        }
