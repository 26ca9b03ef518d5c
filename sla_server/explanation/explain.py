"""Facts in, an explanation out: the one function behind ``sla why``, ``GET /api/v1/why/NAME`` and the page.

Facts (all of them rows as stored or as in the live snapshot; anything may be missing):

    kind                "volume" or "sla"
    name, at_us, now_us what is asked about, for when, and when that was; ``is_now`` if no time was given
    server              of one of several servers: "acting", the node whose server acts, or None; "stands_by":
                        why the one that answers does not, "" if it does
    live_is_stale       of now: the live snapshot is old, so that states and rates of now are not known
    mode                of the server: "observe", "enforce", or None: not known for that time
    decisions_from_us   decisions are stored from here on; None: none was ever stored
    throttles           in force then: on the volume; for an agreement those that protect it
    decisions           about the same, newest first, none later than ``at_us``
    loop                newest step of the backend's loop for the promise in question, or None
    cut                 the newest of its steps that took something away: why there is a throttle at all
    finding             newest finding (unattributed, infeasible, ...) of the loop, or None
    later, later_more   decisions after ``at_us``, oldest first, and how many more there are
    unexcused           maintenance that counts nevertheless (``agreements.unexcused``)
    volume only:        backend, promises (its own), protected (that of the throttle), measured,
                        mode_here (of its backend), mode_for (of the promise that is or would be protected),
                        own_modes ({name, mode} of agreements with one), protects (others that the loop helps)
    agreement only:     version, in_force, promises, own_throttles (on its own volumes), volumes,
                        modes (of the agreement on each of its backends)

What holds, the mode of an agreement, of a backend or of the server, is {mode, of, name}; facts of a server of
before have only ``mode``.

A promise: {sla, objective, priority, metric, percentile, curve, state, live, slice, episode, last_episode};
of ``live``, ``slice`` and ``episode`` each may be None.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, tzinfo
from typing import Any, Final

from sla_server.explanation import evidence, words
from sla_server.explanation.evidence import as_rows
from sla_server.explanation.tense import is_of_now, is_or_was, known_status, state_words
from sla_server.explanation.words import Row, Times

RECENT_US: Final = 120_000_000
"""A finding is repeated once in a minute while it lasts; an older one may be past."""
MOST_DECISIONS: Final = 5
MANUAL: Final = "manual"
RATES: Final = ("cost_per_s", "ops_per_s", "bytes_per_s")
SETS_A_CAP: Final = ("cap-set", "cap-changed", "cap-released")
AT_RISK: Final = ("violating", "at-risk", "bad")


@dataclass(frozen=True, slots=True)
class Section:
    """A title and sentences under it."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is shown.

    Attributes:
        status: of a volume throttled, observed, free or unknown; of an agreement violated, at-risk, kept,
            idle, no-data, above-demand, excluded, not-judged, not-in-force or unknown.
        headline: the answer in a sentence or two.
        sections: what it rests on.
    """

    status: str
    headline: str
    sections: tuple[Section, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def explain(facts: Row, zone: tzinfo | None = UTC) -> Explanation:
    """The explanation of ``facts``, see the module; times in ``zone``, None for this machine's own."""
    times = Times(facts["now_us"], zone)
    made = _volume(facts, times) if facts["kind"] == "volume" else _agreement(facts, times)
    sections = [section for section in made.sections if section.lines]
    lines = (line for section in sections for line in section.lines)
    if any(words.COST_UNIT in line for line in (made.headline, *lines)):
        sections.append(Section("Units", (words.COST_NOTE,)))
    if line := words.acting_line(facts.get("server")):
        sections.append(Section("Server", (line,)))
    return Explanation(made.status, made.headline, tuple(sections))


# -- A volume.


def _volume(facts: Row, times: Times) -> Explanation:
    name, is_now = facts["name"], facts["is_now"]
    be, moment = is_or_was(facts, times)
    # Those of the whole volume first: what one of its clients may have is less to it.
    throttles = sorted(as_rows(facts.get("throttles")), key=words.is_of_a_part)
    newest = next(iter(as_rows(facts.get("decisions"))), None)
    observed = _observed(facts, newest)
    if throttles:
        tightest = next(row for row in throttles if not _is_replaced(row, throttles))
        status = "throttled"
        alike = [row for row in throttles if words.is_alike(row, tightest)]
        limit = words.rates(_in_force(alike, facts)) or "a rate that is no longer stored"
        purpose = _purpose(_as_then(tightest, facts), times)
        headline = f"{words.capped(tightest)} {be} throttled to {limit}{moment}, {purpose}."
    elif observed is not None:
        status = "observed"
        client = (observed.get("figures") or {}).get("client")
        what = words.capped(observed) if client else "it"
        limit = words.rates((observed.get("figures") or {}).get("after"))
        whose = words.mode_of(_mode_for(facts))
        headline = (
            f"{name} {be} not throttled{moment}: {whose} {be} observe. Mode enforce would have throttled "
            f"{what} to {limit} to keep {observed.get('victim')}."
        )
    elif not is_now and _is_too_old(facts):
        status = "unknown"
        headline = f"Nothing that is stored says that {name} was throttled{moment}."
    else:
        status = "free"
        headline = f"{name} {be} not throttled{moment}."
    risky = [p for p in as_rows(facts.get("promises")) if p.get("state") in AT_RISK]
    if risky:
        headline += f" Its promise {risky[0]['sla']}/{risky[0]['objective']} {state_words(risky[0], facts)}."
    sections = [
        Section("Stored", tuple(_reach_lines(facts, times))),
        Section("Why", tuple(_why_throttled(throttles, facts, times))),
        *_loop_sections(facts, throttles, times),
        Section("Volume", tuple(_filled(evidence.measured_line(facts.get("measured"), times)))),
        Section("Own promise", tuple(_own_promise(facts, times))),
        Section("Maintenance", tuple(evidence.unexcused_lines(facts, times))),
        Section("Decisions", tuple(_decision_lines(facts, times, name))),
        Section("Since then", tuple(_later_lines(facts, times))),
    ]
    return Explanation(known_status(status, facts), headline, tuple(sections))


def _mode_here(facts: Row) -> Row:
    """What holds on the volume's backend."""
    found: Row = facts.get("mode_here") or {"mode": facts.get("mode"), "of": "server", "name": ""}
    return found


def _mode_for(facts: Row) -> Row:
    """What holds for the promise that is, or would be, protected by throttling the volume."""
    found: Row = facts.get("mode_for") or _mode_here(facts)
    return found


def _observed(facts: Row, newest: Row | None) -> Row | None:
    """What observe would have done to the volume, if that is the newest thing decided about it."""
    if newest is None or newest.get("kind") != "observed" or _mode_for(facts)["mode"] == "enforce":
        return None
    protected = (facts.get("protected") or {}).get("state")
    calm = protected not in (None, *AT_RISK)
    return None if calm else newest


def _in_force(throttles: Sequence[Row], facts: Row) -> Row:
    """What is in force of throttles that are about the same: the newest decision about any of them says so.

    Without one, the lowest of each rate, as far as their rates then are stored. A cap below a floor is lifted
    to it; the newest decision about the throttle says to what.
    """
    if (held := _held(throttles, facts)) is not None:
        return held
    lowest: dict[str, float] = {}
    for throttle in (row for row in throttles if not _is_replaced(row, throttles)):
        found = _rates_then(throttle, facts)
        for name in RATES:
            rate = (found or {}).get(name)
            if rate is not None:
                lowest[name] = min(rate, lowest.get(name, rate))
    return lowest


def _held(throttles: Sequence[Row], facts: Row) -> Row | None:
    """What the newest decision about their target put in force; None if one of them has no decision."""
    if any(_decision_of(throttle, facts) is None for throttle in throttles):
        return None
    about = (
        row
        for row in as_rows(facts.get("decisions"))
        if row.get("kind") in SETS_A_CAP and words.capped(row) == words.capped(throttles[0])
    )
    held: Row | None = (next(about, {}).get("figures") or {}).get("in_force")
    return held or None


def _is_replaced(throttle: Row, throttles: Sequence[Row]) -> bool:
    """Whether a throttle by hand takes the place of the policy's on the same target."""
    if throttle.get("source") != "policy" or throttle.get("reason") == words.AGREED:
        return False
    return any(other.get("source") == MANUAL and words.is_alike(other, throttle) for other in throttles)


def _as_then(throttle: Row, facts: Row) -> Row:
    """A throttle with the reason that it had then: its row has that of its last step, or of its end."""
    decision = None if facts["is_now"] or throttle.get("source") == MANUAL else _decision_of(throttle, facts)
    if decision is None:
        return throttle
    return {**throttle, **{key: decision[key] for key in ("reason", "text") if decision.get(key)}}


def _decision_of(throttle: Row, facts: Row) -> Row | None:
    """The newest decision, by then, that set this throttle's rate."""
    wanted = throttle["throttle_id"]
    for row in as_rows(facts.get("decisions")):
        if (
            row.get("kind") in ("cap-set", "cap-changed")
            and (row.get("figures") or {}).get("throttle_id") == wanted
        ):
            return row
    return None


def _rates_then(throttle: Row, facts: Row) -> Row | None:
    """Rates of a throttle at the time asked for: what its decision put in force, else its own row's."""
    decision = _decision_of(throttle, facts)
    if decision is not None:
        figures: Row = decision.get("figures") or {}
        after: Row = figures.get("after") or {}
        # What holds is this one's rate, lifted to the floor, if no other throttle is in force.
        held: Row = (figures.get("in_force") or {}) if _is_only(throttle, facts) else {}
        return {name: max(rate, held.get(name) or rate) for name, rate in after.items()}
    # A throttle's row has its last rate only; one set by hand never has another.
    return evidence.lifted(throttle) if facts["is_now"] or throttle.get("source") == MANUAL else None


def _is_only(throttle: Row, facts: Row) -> bool:
    """Whether no other throttle of the volume, or of the same client of it, is in force."""
    return all(
        other["throttle_id"] == throttle["throttle_id"] or not words.is_alike(other, throttle)
        for other in as_rows(facts.get("throttles"))
    )


def _purpose(throttle: Row, times: Times) -> str:
    source, victim = throttle.get("source"), throttle.get("victim")
    if source == MANUAL:
        by = f" by {throttle['who']}" if throttle.get("who") else ""
        return f"set by hand{by} at {times.when(throttle['requested_us'])}"
    if throttle.get("reason") == words.AGREED:
        return words.reason_of(throttle)
    if source == "policy":
        return "asked for by the policy"
    if throttle.get("reason") in words.AHEAD:
        return f"to keep {victim}: {words.reason_of(throttle)}"
    return f"to keep {victim}" if victim else "by the control loop"


def _why_throttled(throttles: Sequence[Row], facts: Row, times: Times) -> list[str]:
    lines = []
    if not throttles:
        lines += _mode_lines(facts)
    for throttle in throttles:
        decision = _decision_of(throttle, facts)
        figures: Row = (decision or {}).get("figures") or {}
        since = f"Since {times.when(throttle['requested_us'])}"
        asked = words.rates(_asked(throttle, decision, facts)) or "a rate that is no longer stored"
        alone = f" for client {throttle['client']} alone" if throttle.get("client") else ""
        if whose := words.together(throttle.get("client") or ""):
            alone = f" for all clients together {whose}"
        if throttle.get("client") and not throttle["volume"]:
            alone = f" for client {throttle['client']} over all its volumes together"
        if throttle.get("group_name"):
            alone = f" for all volumes of group {throttle['group_name']} together"
        lines.append(f"{since}: {asked} at most{alone}, {_purpose(_as_then(throttle, facts), times)}.")
        if whose:
            lines.append(
                "Clients came to the volume under one new name after another while it was slowed down. So "
                "they share one rate now, and a new name brings no new allowance."
            )
        if _is_replaced(throttle, throttles):
            lines.append("It is not in force: one set by hand takes the place of the policy's.")
        if throttle.get("source") == MANUAL and throttle.get("text"):
            lines.append(f"Its reason: {str(throttle['text']).partition('; ')[0].rstrip('.')}.")
        if throttle.get("expires_us"):
            lines.append(f"It ends by itself at {times.when(throttle['expires_us'])}.")
        elif throttle.get("source") == MANUAL and facts["is_now"]:
            client, group = throttle.get("client") or "", throttle.get("group_name") or ""
            lines.append(f"It holds until '{words.release_command(throttle['volume'], client, group)}'.")
        if figures.get("policy_version"):
            lines.append(
                f"Policy version {figures['policy_version']} has this cap for this hour of the week."
            )
        if lifted := _lifted(figures):
            lines.append(lifted)
        elif floor := evidence.floor_text(figures):
            lines.append(f"Never below its floor, {floor}.")
        lines += _filled(_changes_of(throttle, facts, times))
        proof = decision if decision is not None and not facts["is_now"] else throttle
        lines.append(evidence.proof_line(proof, figures, facts["at_us"], times, is_now=facts["is_now"]))
    counting = [row for row in throttles if not _is_replaced(row, throttles)]
    if any(words.is_alike(row, other) for row, other in itertools.combinations(counting, 2)):
        lines.append("Of several throttles the lowest rate holds.")
    return lines


def _mode_lines(facts: Row) -> list[str]:
    """What is only logged, of a volume that is not throttled; [] where everything acts."""
    here, rows = _mode_here(facts), as_rows(facts.get("own_modes"))
    enforced, observed = (
        words.listed([row["name"] for row in rows if row["mode"] == mode]) for mode in ("enforce", "observe")
    )
    if here["mode"] == "observe":
        whose = "In mode observe"
        if here["of"] != "server":
            whose = words.sentence(f"{words.mode_of(here)} is observe").removesuffix(".") + ":"
        lines = [f"{whose} the loop and the policies only log; what is set by hand acts."]
        return [*lines, f"The loop acts for those with mode enforce: {enforced}."] if enforced else lines
    return [f"For agreements with mode observe the loop only logs: {observed}."] if observed else []


def _changes_of(throttle: Row, facts: Row, times: Times) -> str:
    """How often the rate of a throttle was changed since it was set; "" if never."""
    changed = [
        row
        for row in as_rows(facts.get("decisions"))
        if row.get("kind") == "cap-changed"
        and (row.get("figures") or {}).get("throttle_id") == throttle["throttle_id"]
    ]
    if not changed:
        return ""
    last: Row = changed[0]
    from_to = (
        f"from {words.rates(last['figures'].get('before'))} to {words.rates(last['figures'].get('after'))}"
    )
    count = "Its rate was changed once" if len(changed) == 1 else f"Its rate was changed {len(changed)} times"
    return f"{count} lately, last at {times.when(last['at_us'])} {from_to} ({words.reason_of(last)})."


def _asked(throttle: Row, decision: Row | None, facts: Row) -> Row | None:
    if decision is not None:
        after: Row = (decision.get("figures") or {}).get("after") or {}
        return after
    return throttle if facts["is_now"] or throttle.get("source") == MANUAL else None


def _lifted(figures: Row) -> str:
    """Where the floor holds instead of the rate that was asked for; "" if it does not."""
    after, held = figures.get("after") or {}, figures.get("in_force") or {}
    if any(held.get(name, rate) > rate * 1.001 for name, rate in after.items()):
        floor = evidence.floor_text(figures)
        return f"What holds is {words.rates(held)}: the volume's floor, {floor}, lies above it."
    return ""


def _own_promise(facts: Row, times: Times) -> list[str]:
    promises = as_rows(facts.get("promises"))
    if not promises:
        return [
            "No promise is in force for it. As a neighbour it has the class and floor of the agreements that "
            "cover it, without one best-effort and the default floor."
        ]
    risky = [p for p in promises if p.get("state") in AT_RISK]
    lines = [f"{evidence.promise_line(p)} It {state_words(p, facts)}." for p in promises[:MOST_DECISIONS]]
    if not facts.get("live_is_stale") and any(p.get("state") for p in promises):
        lines.append(f"At risk: {'yes' if risky else 'no'}.")
    if risky:
        lines.append(f"'sla why {risky[0]['sla']}' says more.")
    return _filled(*lines)


# -- An agreement.


def _agreement(facts: Row, times: Times) -> Explanation:
    name, is_now = facts["name"], facts["is_now"]
    moment = "" if is_now else f" at {times.full(facts['at_us'])}"
    promises = as_rows(facts.get("promises"))
    if not facts.get("in_force"):
        status, headline = "not-in-force", f"{name} {'is' if is_now else 'was'} not in force{moment}."
    elif not promises:
        status, headline = "not-judged", f"{name} has no promise."
    else:
        worst = min(promises, key=_rank)
        status = words.SLA_STATES.get(str(worst.get("state")), ("unknown", "", ""))[0]
        headline = (
            f"{name}/{worst['objective']} {state_words(worst, facts)}{moment}."
            f"{evidence.by_hand(facts, status)}{_help(facts, worst, status)}"
        )
    sections = [
        Section("Stored", tuple(_reach_lines(facts, times))),
        Section("Promise", tuple(evidence.promise_line(promise) for promise in promises)),
        Section("State", tuple(line for promise in promises for line in _state_lines(promise, facts, times))),
        Section("Maintenance", tuple(evidence.unexcused_lines(facts, times))),
        *_loop_sections(facts, as_rows(facts.get("throttles")), times),
        Section("For it", tuple(_helpers(facts, times))),
        Section("Its volumes", tuple(_own_throttles(facts, times))),
        Section("Decisions", tuple(_decision_lines(facts, times, name))),
        Section("Since then", tuple(_later_lines(facts, times))),
    ]
    return Explanation(known_status(status, facts), headline, tuple(sections))


_ORDER: Final = ("violating", "bad", "at-risk", "no-data", "no_data", "out-of-curve", "ok", "good")


def _rank(promise: Row) -> float:
    """Worst first; a state that is not known comes before those that are well: it is no proof of that."""
    state = promise.get("state")
    if state in _ORDER:
        return _ORDER.index(state)
    return len(_ORDER) if state in words.SLA_STATES else _ORDER.index("ok") - 0.5


def _help(facts: Row, worst: Row, status: str) -> str:
    """What is done about it, in the headline; "" when nothing has to be."""
    throttled = sorted({words.capped(row) for row in as_rows(facts.get("throttles"))})
    be, plural = ("is", "are") if is_of_now(facts) else ("was", "were")
    if throttled:
        are = be if len(throttled) == 1 else plural
        return f" {words.listed(throttled)} {are} throttled for it."
    if status not in ("violated", "at-risk"):
        return ""
    server = {"mode": facts.get("mode"), "of": "server", "name": ""}
    modes = as_rows(facts.get("modes")) or [server]
    observing = list(dict.fromkeys(words.mode_of(row) for row in modes if row["mode"] == "observe"))
    if observing:
        but = ":" if all(row["mode"] == "observe" for row in modes) else ", and"
        are = be if len(observing) == 1 else plural
        return f" Nothing {be} throttled for it{but} {words.listed(observing)} {are} observe."
    finding: Row | None = facts.get("finding")
    found_out = finding is not None and facts["at_us"] - finding["at_us"] <= RECENT_US
    return f" Nothing {be} throttled for it{': see below' if found_out else ''}."


def _state_lines(promise: Row, facts: Row, times: Times) -> list[str]:
    lines = []
    live: Row | None = promise.get("live")
    if live is not None:
        lines.append(evidence.live_line(live, promise["objective"]))
        left = live.get("budget_remaining")
        if left is not None:
            overspent = ": more was spent than there is" if left < 0 else ""
            lines.append(f"Error budget left: {words.percent_down(left)}{overspent}.")
    found: Row | None = promise.get("slice")
    if found is not None:
        lines.append(evidence.slice_line(promise, found, times))
    elif live is None and facts["is_now"]:
        lines.append(f"{promise['objective']}: no slice of it has been judged yet.")
    elif not facts["is_now"] and facts.get("in_force"):
        lines.append(f"{promise['objective']}: no slice of that time is stored.")
    episode: Row | None = promise.get("episode")
    if episode is not None:
        still = "; whether it still is, is not known" if facts.get("live_is_stale") else ""
        since = times.when(episode["opened_us"])
        lines.append(f"Violated since {since}, {_worst(episode, promise)}{still}.")
    elif (last := promise.get("last_episode")) is not None:
        ended = last["closed_us"]
        lines.append(f"The last violation was from {times.when(last['opened_us'])} to {times.when(ended)}.")
    return lines


def _worst(episode: Row, promise: Row) -> str:
    worst = episode.get("worst_u")
    if worst is None:
        return "its depth is not stored"
    allowed = "the misses allowed" if promise.get("metric") == "latency" else "what is allowed"
    return f"at worst {worst:.2f} times {allowed}"


def _helpers(facts: Row, times: Times) -> list[str]:
    lines, others = [], _other_victims(facts)
    for throttle in as_rows(facts.get("throttles")):
        decision = _decision_of(throttle, facts)
        asked = words.rates(_asked(throttle, decision, facts)) or "a rate that is no longer stored"
        figures: Row = (decision or {}).get("figures") or {}
        proof = decision if decision is not None and not facts["is_now"] else throttle
        said = evidence.proof_line(proof, figures, facts["at_us"], times, is_now=facts["is_now"])
        victim, since = str(throttle.get("victim") or ""), times.when(throttle["requested_us"])
        other = (
            f" It was set for {victim}; the loop helps this promise by it, too." if victim in others else ""
        )
        lines.append(f"{words.capped(throttle)}: {asked} at most since {since}.{other} {said}")
    return lines


def _other_victims(facts: Row) -> set[str]:
    """Promises of others that the throttles helping an agreement were set for; none of a volume."""
    if facts["kind"] != "sla":
        return set()
    victims = {str(throttle.get("victim") or "") for throttle in as_rows(facts.get("throttles"))}
    return victims - {
        "",
        *(f"{facts['name']}/{each['objective']}" for each in as_rows(facts.get("promises"))),
    }


def _own_throttles(facts: Row, times: Times) -> list[str]:
    """Throttles on the agreement's own volumes: their delay counts against its own promise.

    Unless all of its promises are excluded, by maintenance or the hours of service.
    """
    lines = []
    states = {each.get("state") for each in as_rows(facts.get("promises"))}
    counts = "the delay does not count" if states == {"excluded"} else "the delay counts against this promise"
    for row in as_rows(facts.get("own_throttles")):
        verb = "is" if is_of_now(facts) else "was"
        lines.append(
            f"{words.capped(row)} {verb} throttled itself since {times.when(row['requested_us'])}, "
            f"{_purpose(_as_then(row, facts), times)}: {counts}."
        )
    return lines


# -- Both.


def _loop_sections(facts: Row, throttles: Sequence[Row], times: Times) -> list[Section]:
    """What the windows said and who used what when the loop last decided, and what it found out."""
    loop: Row | None = facts.get("loop")
    cut: Row | None = facts.get("cut") if loop is not None else None
    finding: Row | None = facts.get("finding")
    if finding is not None and facts["at_us"] - finding["at_us"] > RECENT_US:
        finding = None
    if facts["kind"] == "volume" and not any(row.get("source") == "control" for row in throttles):
        finding = None
        if _mode_for(facts)["mode"] == "enforce" or not as_rows(facts.get("decisions")):
            loop = None
    newest = max(
        (row for row in (loop, finding) if row is not None), key=lambda row: row["at_us"], default=None
    )
    if newest is None:
        return []
    told = [row for row in (cut, newest) if row is not None]
    windows = [evidence.windows_line(row.get("figures") or {}, row["at_us"], times) for row in told]
    protected: Row | None = facts.get("protected")
    kept = [evidence.promise_line(protected)] if protected else []
    if others := [str(name) for name in facts.get("protects") or ()]:
        kept.append(f"The loop helps {words.listed(others)} by it, too.")
    return [
        Section("It protects", tuple(kept)),
        Section("Windows", tuple(_filled(*windows))),
        Section("Who used it", tuple(evidence.use_lines(newest))),
        Section("Decided", tuple(_decided_lines((cut, loop, finding), times))),
    ]


def _decided_lines(rows: Iterable[Row | None], times: Times) -> list[str]:
    known = sorted((row for row in rows if row is not None), key=lambda row: row["at_us"])
    return _filled(*(evidence.decision_line(row, times) for row in known))


def _decision_lines(facts: Row, times: Times, name: str) -> list[str]:
    """The newest decisions, newest first; that there is none is an answer, too."""
    rows = as_rows(facts.get("decisions"))
    reach = facts.get("decisions_from_us")
    if facts["kind"] == "sla":  # the caps of volumes follow from the steps of the backend
        rows = [row for row in rows if not row.get("volume")] or rows
    if rows:
        return [evidence.decision_line(row, times) for row in rows[:MOST_DECISIONS]]
    if reach is None or _is_too_old(facts):
        return []
    if others := sorted({victim.partition("/")[0] for victim in _other_victims(facts)}):
        return [f"None was about {name} itself: 'sla why {others[0]}' says what the loop decided."]
    until = "" if facts["is_now"] else " up to then"
    return [f"None about {name} is stored{until} (they are stored from {times.full(reach)} on)."]


def _later_lines(facts: Row, times: Times) -> list[str]:
    if facts["is_now"]:
        return []
    rows = as_rows(facts.get("later"))
    line = evidence.changes_line(rows, facts.get("later_more") or 0, times)
    return [line] if line else ["Nothing was decided about it since."]


def _is_too_old(facts: Row) -> bool:
    reach = facts.get("decisions_from_us")
    return reach is None or facts["at_us"] < reach


def _reach_lines(facts: Row, times: Times) -> list[str]:
    """What is no longer, or not yet, stored of that time."""
    reach = facts.get("decisions_from_us")
    if facts.get("live_is_stale"):
        return [words.silence(facts.get("server"))]
    if facts["is_now"] or not _is_too_old(facts):
        return []
    if reach is None:
        return ["No decision is stored yet: this server has not kept them before."]
    return [
        f"Decisions are stored from {times.full(reach)} on. What was decided before, and why, is no longer "
        "known; what follows is what is left of that time."
    ]


def _filled(*lines: str) -> list[str]:
    """Each line once, and none that is empty."""
    return [line for line in dict.fromkeys(lines) if line]
