"""The back-test: would the policy have helped in the last days?

What was stored of them is replayed through the simulator of ``sla simulate``: the real control code in mode
enforce, against a queue fitted to each backend. Three runs differ by the policy alone: none (reaction by
itself), the one in force, and the new one. Each run has the same arrivals.

Bounded: only backends on which one of the two policies caps something are replayed, at most
``MOST_BACKENDS`` of them, and together at most ``[policy] back_test_ios`` I/Os a run; of those slots in which
a promise was not at ease, evenly chosen ones (``simulate.stored``). Deterministic: what was stored decides.

The new policy *helps* if fewer slices are bad than without any, or as few, and fewer seconds by a tenth at
least. It must not do worse than the one in force, nor as well at the price of more I/Os held back. A policy
that caps nothing is published, too, unless the one in force does better: it has costs and demands.

A policy that works hides what it is for: what is stored is the load that it let through, and a replay of that
breaks no more without a policy. Where neither the one in force nor the new one avoids anything, and volumes
that the former caps were held back, the new one takes its place if it caps all of those, too; else the one in
force stays, unless agreements have changed since it was made: then it may be for a promise that is no more.

What is replayed is also what the policy was learned from: it may do less well on days to come.

Within a slot, requests are spread as the raw cuts say (``simulate.within``), which are stored for two days,
so a burst of some seconds is there. Of older slots nothing shorter is stored: a policy that is good for such
bursts alone, and none of the last two days, is rejected; ``[policy] publish = "always"``, or a pin, overrides
that.

Of a fleet of which not even an hour can be held, some volumes of each backend are replayed by themselves and
the others as one neighbour (``sampling``); the report says which share that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from pmdaemon.runtime.config import describe as described
from sla_server.agreements.document import Agreement
from sla_server.agreements.promise import Promise
from sla_server.agreements.volume_labels import label_book
from sla_server.config import ResolvedConfig
from sla_server.db.config import DatabaseConfig
from sla_server.db.errors import FileDamaged, FilesUnavailable
from sla_server.db.policies import PolicyStore
from sla_server.db.queries.replay import StoredSlots, StreamSample, TooManyRows, read_slots, read_streams
from sla_server.db.queries.replay_cuts import read_cuts
from sla_server.policy_jobs.errors import UnreadableAgreement
from sla_server.policy_jobs.sampling import BackendSample, sample_streams, seed_of
from sla_server.policy_jobs.scope import KnownNames
from sla_server.services.plans import from_rows as plans_of
from sla_server.simulate.errors import NothingStored, TooManyIos
from sla_server.simulate.figures import figures_of
from sla_server.simulate.run import Plan, run_mode
from sla_server.simulate.setup import Contract, contract_of
from sla_server.simulate.stored import stored_plan
from sla_server.simulate.within import slots_of, with_cuts

DAY_US: Final = 86_400_000_000
LEAST_WINDOW_US: Final = DAY_US // 24
MOST_BACKENDS: Final = 16
LESS_BAD: Final = 0.9  # of the bad seconds: less of a difference may be chance
MORE_HELD: Final = 1.25  # of the I/Os held back: demands differ that much from week to week
MOST_NAMED: Final = 3
CapRows = Callable[[], Iterable[Mapping[str, Any]]]
"""Gives the rows of a policy with a cap, again each time: of a large fleet they are never held together."""
Caps = Mapping[int, Mapping[str, float | None]]
Bursts = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class ReplaySums:
    """One run, all replayed backends together.

    Attributes:
        judged, bad: slices.
        bad_s: seconds in which a promise was broken.
        ios: requests answered.
        held_back: those of them that a throttle let wait, and those that were not made, as so many of the
            client's were outstanding.
    """

    judged: int = 0
    bad: int = 0
    bad_s: int = 0
    ios: int = 0
    held_back: int = 0

    def plus(self, other: ReplaySums) -> ReplaySums:
        """Both together."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return ReplaySums(*(one + two for one, two in pairs))


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether to publish, and why or why not."""

    publish: bool
    reason: str


def verdict(
    none: ReplaySums,
    new: ReplaySums,
    former: ReplaySums | None,
    *,
    is_empty: bool,
    held: Collection[str] = (),
    lost: Collection[str] = (),
) -> Advice:
    """Compare the runs.

    Args:
        none: without a policy.
        new: with the new one.
        former: with the one in force; None: there is none that caps anything here.
        is_empty: the new one caps nothing.
        held: volumes that the one in force caps, and that were held back in what is replayed.
        lost: of them those that the new one does not cap although no agreement has changed.
    """
    against = f"bad slices {new.bad} with it, {none.bad} without; bad seconds {new.bad_s} and {none.bad_s}"
    if former is not None:
        against += f"; with the one in force {former.bad} and {former.bad_s} s"
    if new.bad > none.bad:
        return Advice(False, f"it does harm: {against}")
    if former is not None and not is_better(former, new):
        if is_better(new, former):
            return Advice(False, f"the one in force does better: {against}")
        if new.held_back > former.held_back * MORE_HELD:
            held_back = f"I/Os held back {new.held_back}, with the one in force {former.held_back}"
            return Advice(False, f"it holds more back for the same: {against}; {held_back}")
        if held and not any(is_better(*pair) for pair in ((none, former), (none, new), (new, none))):
            return _succession(lost, against)
    if is_empty:
        return Advice(True, "it caps nothing")
    if is_better(none, new):
        return Advice(True, f"it helps: {against}")
    if not none.bad_s:
        return Advice(False, f"there is nothing to avoid: {against}; it would only hold I/Os back")
    return Advice(False, f"it does not help: {against}")


def _succession(lost: Collection[str], against: str) -> Advice:
    """Where the load was held back already, and no policy shows what it avoids."""
    if not lost:
        return Advice(
            True, f"it takes the place of the one in force, which held back what is replayed: {against}"
        )
    names = sorted(lost)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return Advice(
        False,
        f"the one in force holds back {', '.join(names[:MOST_NAMED])}{more}, which it would not cap, and "
        f"what would be asked for without caps is not stored: {against}",
    )


def held_volumes(found: StoredSlots, volumes: Collection[str]) -> frozenset[str]:
    """Of these volumes those that a throttle held back."""
    is_held = (found.slots["delay_sum_us"] > 0) | (found.slots["held_max"] > 0)
    streams = np.unique(found.slots["stream_id"][is_held]).tolist()
    names = (found.streams[number]["volume"] for number in streams if number in found.streams)
    return frozenset(names).intersection(volumes)


def is_better(before: ReplaySums, after: ReplaySums) -> bool:
    """Whether ``after`` breaks fewer promises than ``before``, by more than chance."""
    if after.bad != before.bad:
        return after.bad < before.bad
    return after.bad_s < before.bad_s * LESS_BAD


@dataclass(frozen=True, slots=True)
class ReplayedPolicy:
    """A policy as the simulator takes it, by hour of the week: caps, and their bursts where they have one."""

    caps: Caps
    bursts: Bursts


NO_POLICY: Final = ReplayedPolicy({}, {})


def by_hour(rows: Iterable[Mapping[str, Any]]) -> ReplayedPolicy:
    """The policy of rows of caps."""
    caps: dict[int, dict[str, float | None]] = {}
    bursts: dict[int, dict[str, float]] = {}
    for row in rows:
        hour, burst_s = int(row["hour_of_week"]), row.get("burst_s")
        if row["cost_per_s"] is not None:
            caps.setdefault(hour, {})[row["volume"]] = float(row["cost_per_s"])
            if burst_s is not None:
                bursts.setdefault(hour, {})[row["volume"]] = float(burst_s)
    return ReplayedPolicy(caps, bursts)


def backend_plans(
    found: StoredSlots, contract: Contract, volumes: set[str], from_us: int, most_ios: int
) -> tuple[list[tuple[str, Plan]], list[str]]:
    """A plan for each backend with one of these volumes, most misses first, and what is left out."""
    of_backend: dict[str, list[int]] = {}
    for number, stream in found.streams.items():
        of_backend.setdefault(stream["backend"], []).append(number)
    wanted = {s["backend"] for s in found.streams.values() if s["volume"] in volumes}
    missed = {name: _total(found.missed, "missed", of_backend[name]) for name in wanted}
    order = sorted(wanted, key=lambda name: (-missed[name], name))
    count = min(len(order), MOST_BACKENDS)
    while True:
        of_each = {name: _only(found, of_backend[name]) for name in order[:count]}
        plans, left_out = _plans_of(of_each, contract, from_us, max(most_ios // max(count, 1), 1))
        if plans or count <= 1:
            return plans, left_out + [
                f"backend {name} was not replayed: {count} are" for name in order[count:]
            ]
        count //= 2  # not even a slot of any is within its share: fewer have larger ones


def _plans_of(
    of_each: Mapping[str, StoredSlots], contract: Contract, from_us: int, share: int
) -> tuple[list[tuple[str, Plan]], list[str]]:
    plans: list[tuple[str, Plan]] = []
    left_out: list[str] = []
    for name, slots in of_each.items():
        own = contract_on(contract, {stream["volume"] for stream in slots.streams.values()})
        try:
            plan = stored_plan(slots, own, from_us, share, sample=True)
        except NothingStored:
            left_out.append(f"backend {name} was not replayed: it had no I/O")
        except TooManyIos as exc:
            left_out.append(f"backend {name} was not replayed: {exc}; raise [policy] back_test_ios")
        else:
            plans.append((name, plan))
    return plans, left_out


def contract_on(contract: Contract, volumes: Collection[str]) -> Contract:
    """Of a contract what is about one of these volumes.

    A replay goes through promises times streams; of a fleet nearly all promises are about other backends.
    """
    names = KnownNames(volumes)
    return dataclasses.replace(
        contract,
        promises=[each for each in contract.promises if names.meant(each.volumes)],
        classes=[each for each in contract.classes if names.meant(each.volumes)],
    )


def _total(columns: Mapping[str, Any], name: str, streams: Sequence[int]) -> int:
    return int(columns[name][np.isin(columns["stream_id"], streams)].sum())


def _only(found: StoredSlots, streams: Sequence[int]) -> StoredSlots:
    def chosen(columns: Mapping[str, Any]) -> dict[str, Any]:
        mine = np.isin(columns["stream_id"], streams)
        return {name: column[mine] for name, column in columns.items()}

    names = {number: found.streams[number] for number in streams}
    return dataclasses.replace(found, slots=chosen(found.slots), missed=chosen(found.missed), streams=names)


def outcome(plan: Plan, policy: ReplayedPolicy) -> ReplaySums:
    """One run of a plan in mode enforce."""
    plan = dataclasses.replace(plan, policy=policy.caps, bursts=policy.bursts)
    run = run_mode(plan, "enforce")
    figures = figures_of(plan, run, None)
    states = [promise.slices for promise in figures.promises]
    return ReplaySums(
        judged=sum(s.get("good", 0) + s.get("bad", 0) for s in states),
        bad=sum(s.get("bad", 0) for s in states),
        bad_s=sum(promise.bad_s for promise in figures.promises),
        ios=sum(volume.ios for volume in figures.volumes),
        held_back=sum(log.held_back for log in run.logs.values()) + run.left_out,
    )


def compare(
    plans: Sequence[tuple[str, Plan]], new: ReplayedPolicy, former: ReplayedPolicy | None
) -> dict[str, Any]:
    """The runs of all plans, summed and by backend."""
    sums = {"none": ReplaySums(), "new": ReplaySums()} | ({} if former is None else {"former": ReplaySums()})
    policies = {"none": NO_POLICY, "new": new} | ({} if former is None else {"former": former})
    rows = []
    for backend, plan in plans:
        runs = {name: outcome(plan, policies[name]) for name in sums}
        sums = {name: sums[name].plus(run) for name, run in runs.items()}
        rows.append({"backend": backend, **{name: dataclasses.asdict(run) for name, run in runs.items()}})
    return {**{name: dataclasses.asdict(each) for name, each in sums.items()}, "backends": rows}


def made(
    store: PolicyStore,
    config: ResolvedConfig,
    caps: CapRows,
    now_us: int,
    demands: Mapping[str, float] | None = None,
    against_in_force: bool = True,
) -> dict[str, Any]:
    """The back-test of a policy, as it is put into its report.

    Args:
        store: agreements, and the policy in force.
        config: the server's.
        caps: of the new policy.
        now_us: the end of what is replayed.
        demands: cost rate of each volume; which are the largest.
        against_in_force: whether it is compared with the policy in force, too.

    Returns:
        ``publish`` and ``reason``; unless nothing was to be replayed also from_us and to_us, ``none``,
        ``new`` and perhaps ``former`` (fields of ``ReplaySums``), ``backends`` (the same of each), ``notes``;
        ``sampled`` of a large fleet (fields of ``BackendSample``).

    Raises:
        UnreadableAgreement: one in force does not fit this release.
        DatabaseUnavailable: retryable.
    """
    in_force = store.reader.policy_in_force() if against_in_force else None
    former_caps: CapRows = tuple
    if in_force is not None:
        former_caps = partial(store.reader.capped_hours, in_force["version"])
    capped, former_capped = ({str(row["volume"]) for row in rows()} for rows in (caps, former_caps))
    volumes = capped | former_capped
    if not volumes:
        return {"publish": True, "reason": "it caps nothing, like the policy in force"}
    contract = _contract(store, now_us)
    plans: list[tuple[str, Plan]] = []
    notes, times = ["an hour has more rollups than can be replayed"], dict[str, Any]()
    sampled: list[BackendSample] = []
    held = frozenset[str]()
    stored = _stored(config, now_us)
    if stored is None:
        sample, sampled = _sample_of(config, contract, volumes, demands or {}, seed_of(caps()))
        stored = _stored(config, now_us, sample)
    if stored is not None:
        found, from_us, to_us = stored
        times = {"from_us": from_us, "to_us": to_us}
        held = held_volumes(found, former_capped)
        plans, notes = backend_plans(found, contract, volumes, from_us, config.policy.back_test_ios)
        plans, problems = _within_slots(config, plans, found.slot_s, fits=not sampled)
        notes += problems
        notes += [each.words for each in sampled]
        times |= {"sampled": [dataclasses.asdict(each) for each in sampled]} if sampled else {}
    if not plans:
        verdict_ = Advice(False, "nothing could be replayed")  # one of the two caps something
        result: dict[str, Any] = {}
    else:
        replayed = {stream.volume for _, plan in plans for stream in plan.streams}
        new, former = (
            by_hour(row for row in rows() if row["volume"] in replayed) for rows in (caps, former_caps)
        )
        result = compare(plans, new, former if former_capped else None)
        outcomes = {name: ReplaySums(**result[name]) for name in ("none", "new", "former") if name in result}
        held &= replayed
        lost = held - capped
        if lost and in_force is not None and _have_agreements_changed(store, in_force["version"]):
            lost = frozenset()
        verdict_ = verdict(
            outcomes["none"],
            outcomes["new"],
            outcomes.get("former"),
            is_empty=not capped,
            held=held,
            lost=lost,
        )
    reason, publish = verdict_.reason, verdict_.publish
    if not publish and config.policy.publish == "always":
        reason, publish = f'{reason}; published all the same: publish = "always"', True
    notes += [note for _, plan in plans for note in plan.notes]
    return {"publish": publish, "reason": reason, **times, **result, "notes": list(dict.fromkeys(notes))}


def _within_slots(
    config: ResolvedConfig, plans: Sequence[tuple[str, Plan]], slot_s: int, *, fits: bool
) -> tuple[list[tuple[str, Plan]], list[str]]:
    """The plans with what cuts say of their slots, and why not."""
    streams, begins = set[int](), set[int]()
    for _, plan in plans:
        of_plan, slots_us = slots_of(plan)
        streams |= of_plan
        begins.update(slots_us)
    slot_us = slot_s * 1_000_000
    try:
        cuts = read_cuts(_database(config), config.data_dir, streams, sorted(begins), slot_us)
    except (FileDamaged, FilesUnavailable) as exc:
        return list(plans), [f"what happened within slots is not known: {exc}"]
    return [(name, with_cuts(plan, cuts, fits=fits)) for name, plan in plans], []


def _have_agreements_changed(store: PolicyStore, version: int) -> bool:
    """Whether an agreement was applied or has ended since this policy was made."""
    policy = store.reader.policy(version)
    made_us = policy["created_us"] if policy is not None else 0
    rows = store.reader.all_agreements()
    return any(max(row["applied_us"], row["ended_us"] or 0) > made_us for row in rows)


def _contract(store: PolicyStore, now_us: int) -> Contract:
    agreements = []
    for row in store.reader.agreements():
        try:
            agreements.append(Agreement.from_spec(row["spec"]))
        except ValidationError as exc:
            raise UnreadableAgreement(row["name"], row["version"], described(exc)) from exc
    plans, _unread = plans_of(store.reader.documents(), now_us)
    contract = contract_of(agreements, plans, label_book(*store.reader.pages.label_rows()))
    # Control, and so a policy, is there for latencies; the other indicators ask it for nothing.
    latencies = [promise for promise in contract.promises if promise.metric == "latency"]
    return dataclasses.replace(contract, promises=latencies)


def _database(config: ResolvedConfig) -> DatabaseConfig:
    database = config.database
    if database.policy_url:
        return database.model_copy(update={"url": database.policy_url, "reader_url": ""})
    return database


def _sample_of(
    config: ResolvedConfig, contract: Contract, volumes: set[str], demands: Mapping[str, float], seed: bytes
) -> tuple[StreamSample, list[BackendSample]]:
    """A sample of the backends with most demand of volumes that are capped."""
    streams = read_streams(_database(config), config.data_dir)
    totals = dict[str, float]()
    for backend, volume in sorted({(s["backend"], s["volume"]) for s in streams.values()}):
        if volume in volumes:
            totals[backend] = totals.get(backend, 0.0) + demands.get(volume, 0.0)
    backends = sorted(totals, key=lambda name: (-totals[name], name))[:MOST_BACKENDS]
    names = KnownNames({s["volume"] for s in streams.values() if s["backend"] in backends})
    promises: dict[str, list[Promise]] = {}
    for promise in contract.promises:
        for volume in names.meant(promise.volumes):
            promises.setdefault(volume, []).append(promise)

    def covers(volume: str, client: str) -> bool:
        return any(promise.covers(volume, client) for promise in promises.get(volume, ()))

    return sample_streams(streams, backends, covers, volumes, demands, seed)


def _stored(
    config: ResolvedConfig, now_us: int, sample: StreamSample | None = None
) -> tuple[StoredSlots, int, int] | None:
    """What is stored of the last days, or of as much of them as can be held; None: not even of an hour."""
    database = _database(config)
    slot_us = database.rollup_s * 1_000_000
    to_us = now_us // slot_us * slot_us
    window_us = config.policy.back_test_days * DAY_US
    while True:
        from_us = (to_us - window_us) // slot_us * slot_us
        try:
            return read_slots(database, config.data_dir, from_us, to_us, sample), from_us, to_us
        except TooManyRows:
            if window_us <= LEAST_WINDOW_US:
                return None
            window_us //= 2


def describe(found: Mapping[str, Any]) -> list[str]:
    """The back-test for people."""
    lines = [f"  back-test: {found['reason']}"]
    if "new" in found:
        held = {name: found[name]["held_back"] for name in ("none", "new", "former") if name in found}
        done = f"{found['new']['ios']:,} answered, without it {found['none']['ios']:,}"
        text = f"    I/Os: {done}; held back or not made: {held['new']:,}, without it {held['none']:,}"
        lines.append(text + (f", with the one in force {held['former']:,}" if "former" in held else ""))
    return lines
