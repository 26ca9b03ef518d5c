"""OpenSLO v1: agreements exported as SLO objects, and SLO objects read as agreements.

What maps: name, labels, the window, and latency objectives. Our rule "at most 1 - q of a slice's I/Os are
slower than the curve's value" is OpenSLO's time slice method over a ratio of good to all events, with the
share q as ``timeSliceTarget``, so nothing is lost in it. OpenSLO has no word for scope, demand curve and I/O
kind: they are the query of the metric sources, of type ``storage-sla``, and are read back from there. A
source of another type names no volume and perhaps no latency, and its calendar periods may begin at a time at
which ours do not: these keys are left empty, and the document is refused at apply until they are filled in.
Everything else that does not map is listed.

Pure: parsed YAML in, plain values out. Source: the OpenSLO v1 specification (SLO, SLI, duration-shorthand).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, time
from hashlib import blake2b
from typing import Any, Final, get_args

from sla_server.agreements.document import Agreement, Control, LatencyObjective
from sla_server.agreements.fields import UNITS_S, format_duration
from sla_server.agreements.periods import CalendarWindow, RollingWindow

API_VERSION: Final = "openslo/v1"
SOURCE_TYPE: Final = "storage-sla"
_PERIODS: Final = {"1d": "day", "1w": "week", "1M": "month", "1Q": "quarter", "1Y": "year"}
_CALENDAR_START: Final = "2024-01-01 00:00:00"  # a Monday, and the first day of all other periods
_BEGINNINGS: Final = {
    "day": "at midnight of timeZone",
    "week": "on Monday at midnight of timeZone",
    "month": "at midnight of its first day in timeZone",
    "quarter": "at midnight of January, April, July or October 1 in timeZone",
    "year": "at midnight of January 1 in timeZone",
}
_EMPTY_PERIOD: Final = "window.period was left empty, fill it in"
_LONG_UNITS_D: Final = {"M": 30, "Q": 91, "Y": 365}
_DURATION: Final = re.compile(r"([1-9][0-9]{0,5})([mhdwMQY])")
_NOT_EXPORTED: Final = (
    "parties", "priority", "guarantee", "cap", "service_hours", "maintenance", "penalties", "credit_cap",
)  # fmt: skip
CONTROL: Final = "storage-sla/control"
"""Annotation of the metadata; OpenSLO has no word for who is slowed down for a promise."""
NAME: Final = "storage-sla/name"
"""Annotation of the metadata: the name that an export would have, where OpenSLO does not take that."""
_LONGEST: Final = 63
_NOT_IN_LABEL: Final = re.compile(r"[^a-z0-9-]+")
_LABEL_KEY: Final = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
"""Names are labels of RFC 1123; keys of labels may be longer words."""
_NOT_IMPORTED: Final = ("description", "service", "alertPolicies")
_SCOPE: Final = ("volumes", "volume_labels", "clients", "io")
_METRICS: Final = ("good", "bad", "raw")
"""Of a ratio; only a ratio of good I/Os can be one of ours."""
_LEAST_SHARE, _MOST_SHARE = 0.5, 0.9999
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Converted:
    """Documents of the other form, and what could not be carried over, each a line for people."""

    documents: list[Json]
    unmapped: list[str]


def to_openslo(agreement: Agreement) -> Converted:
    """One SLO object for each latency objective."""
    spec = agreement.spec_json()["spec"]
    said = agreement.spec.model_dump(exclude_defaults=True)
    unmapped = [f"{agreement.name}: {name}" for name in _NOT_EXPORTED if name in said]
    if agreement.spec.control is not None:
        unmapped.append(f"{agreement.name}: control, but for annotation {CONTROL}, which sla import reads")
    labels = agreement.metadata.labels
    unmapped += [f"{agreement.name}: label {key}" for key in labels if not _LABEL_KEY.fullmatch(key)]
    documents = []
    for objective in agreement.spec.objectives:
        where = f"{agreement.name}/{objective.name}"
        if isinstance(objective, LatencyObjective):
            documents.append(_slo(agreement, objective, spec["scope"]))
            if NAME in documents[-1]["metadata"].get("annotations", ()):
                unmapped.append(f"{where}: its name, but for annotation {NAME}, which sla import reads")
            clauses = objective.applicability.model_dump(exclude_defaults=True)
            unmapped += [f"{where}: applicability.{name}" for name in clauses]
            said = objective.model_dump(include={"no_data", "errors"}, exclude_defaults=True)
            unmapped += [f"{where}: {name}" for name in said]
        else:
            unmapped.append(f"{where}: the whole objective ({objective.indicator.metric})")
    return Converted(documents, unmapped)


def _slo(agreement: Agreement, objective: LatencyObjective, scope: Json) -> Json:
    curve = [step.model_dump(exclude_none=True) for step in objective.demand_curve]
    percentile = objective.indicator.percentile
    good = {"metric": "latency", "demand_curve": curve, **scope}
    name = f"{agreement.name}-{objective.name}"
    metadata: Json = {"name": _rfc_1123(name)}
    if labels := {key: text for key, text in agreement.metadata.labels.items() if _LABEL_KEY.fullmatch(key)}:
        metadata["labels"] = labels
    annotations = {NAME: name} if metadata["name"] != name else {}
    if agreement.spec.control is not None:
        annotations[CONTROL] = agreement.spec.control
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": API_VERSION,
        "kind": "SLO",
        "metadata": metadata,
        "spec": {
            "description": f"{percentile:g} % of I/Os within the latency of the demand curve",
            "service": _rfc_1123(agreement.name),
            "indicator": {
                "metadata": {"name": _rfc_1123(f"{name}-fast-ios")},
                "spec": {
                    "ratioMetric": {
                        "counter": True,
                        "good": {"metricSource": {"type": SOURCE_TYPE, "spec": good}},
                        "total": {"metricSource": {"type": SOURCE_TYPE, "spec": {"metric": "ios", **scope}}},
                    }
                },
            },
            "timeWindow": [_time_window(agreement.spec.window)],
            "budgetingMethod": "Timeslices",
            "objectives": [
                {
                    "displayName": objective.name,
                    "target": objective.budgeting.target,
                    "timeSliceTarget": round(percentile / 100, 6),
                    "timeSliceWindow": _minutes(objective.budgeting.slice_s),
                }
            ],
        },
    }


def _rfc_1123(name: str) -> str:
    """The name, or where it is no label of RFC 1123 one that is made of it, and of no other name."""
    made = _NOT_IN_LABEL.sub("-", name.lower()).strip("-")
    if made == name and len(name) <= _LONGEST:
        return name
    digest = blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{made[: _LONGEST - len(digest) - 1].rstrip('-')}-{digest}"


def _minutes(seconds: int) -> str | float:
    """A duration as OpenSLO writes it; it has no seconds, but fractions of a minute as numbers."""
    return format_duration(seconds) if seconds % 60 == 0 else seconds / 60


def _time_window(window: CalendarWindow | RollingWindow) -> Json:
    if isinstance(window, RollingWindow):
        return {"duration": _minutes(window.duration), "isRolling": True}
    duration = next(text for text, period in _PERIODS.items() if period == window.period)
    calendar = {"startTime": _CALENDAR_START, "timeZone": window.tz}
    return {"duration": duration, "isRolling": False, "calendar": calendar}


def from_openslo(documents: Iterable[Any]) -> Converted:
    """An agreement for each SLO object; what ``indicatorRef`` and ``metricSourceRef`` name is among them.

    Raises:
        ValueError: there is no SLO of version openslo/v1 among them.
    """
    objects = [item for one in documents for item in (one if isinstance(one, list) else [one])]
    maps = [item for item in objects if isinstance(item, dict)]
    named = _Named.of(item for item in maps if item.get("apiVersion") == API_VERSION)
    found, unmapped, unread = [], list[str](), list[tuple[str, str]]()
    for item in maps:
        kind, name = item.get("kind"), _at(item, "metadata", "name")
        if item.get("apiVersion") != API_VERSION:
            unmapped.append(f"{name}: apiVersion {item.get('apiVersion')}; only {API_VERSION} is read")
        elif kind == "SLO":
            reading = _Reading(item, named)
            found.append(reading.agreement())
            unmapped += reading.unmapped
        else:
            unread.append((str(name), str(kind)))
    unmapped += [f"{name}: the whole {kind}" for name, kind in unread if (kind, name) not in named.used]
    if not found:
        raise ValueError(f"there is no SLO of {API_VERSION} in it")
    return Converted(found, unmapped)


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True, slots=True)
class _Named:
    """Objects that others refer to, by kind and name; ``used`` grows as they do."""

    objects: Mapping[tuple[str, str], Json]
    used: set[tuple[str, str]]

    @classmethod
    def of(cls, objects: Iterable[Json]) -> _Named:
        kinds = ("SLI", "DataSource")
        keys = ((str(item.get("kind")), str(_at(item, "metadata", "name")), item) for item in objects)
        return cls({(kind, name): item for kind, name, item in keys if kind in kinds}, set())

    def find(self, kind: str, name: Any) -> Json | None:
        """One of them; None if there is none of that name."""
        key = kind, str(name)
        found = self.objects.get(key)
        if found is not None:
            self.used.add(key)
        return found


class _Reading:
    """One SLO object on its way to an agreement; ``unmapped`` grows as it is read."""

    def __init__(self, slo: Json, named: _Named) -> None:
        self.unmapped: list[str] = []
        self._slo = slo
        self._named = named
        name = _at(slo, "metadata", "annotations", NAME) or _at(slo, "metadata", "name")
        self._name = _name_of(name, "imported")
        self._spec: Json = slo["spec"] if isinstance(slo.get("spec"), dict) else {}

    def _add_note(self, text: str) -> None:
        self.unmapped.append(f"{self._name}: {text}")

    def agreement(self) -> Json:
        """The document, empty where OpenSLO does not say what we need."""
        given = self._spec.get("objectives")
        items = [item for item in (given if isinstance(given, list) else []) if isinstance(item, dict)]
        whole = self._indicator(self._spec, "")
        own = [self._own_indicator(item) or whole for item in items]
        distinct = [each for place, each in enumerate(own) if each not in own[:place]]
        sources = [self._source(each) for each in distinct or [whole]]
        self._add_note("priority is not in OpenSLO; it was set to silver")
        objectives = list(self._objectives(items, own))
        if not objectives:
            self._add_note("it has no objectives: as it is, nothing is promised")
        metadata: Json = {"name": self._name}
        if labels := self._labels():
            metadata["labels"] = labels
        if _at(self._slo, "metadata", "displayName"):
            self._add_note("metadata.displayName")
        for key in _NOT_IMPORTED:
            if self._spec.get(key):
                self._add_note(f"spec.{key}")
        return {
            "apiVersion": "storage-sla/v1",
            "kind": "SLA",
            "metadata": metadata,
            "spec": {
                "scope": self._scope(sources),
                "priority": "silver",
                "objectives": objectives,
                "window": self._window(),
                **self._control(),
            },
        }

    def _indicator(self, holder: Json, where: str) -> Json:
        """What ``indicator`` or ``indicatorRef`` of an SLO, or of one of its objectives, says."""
        name = holder.get("indicatorRef")
        found = self._named.find("SLI", name) if name else holder.get("indicator")
        if name and found is None:
            self._add_note(f"{where}the SLI {name!r} is not in the file")
        for path in (("metadata", "displayName"), ("spec", "description")):
            if _at(found, *path):
                self._add_note(f"{where}{'.'.join(('indicator', *path))}")
        spec = _at(found, "spec")
        return spec if isinstance(spec, dict) else {}

    def _own_indicator(self, item: Json) -> Json:
        """Of an objective of a composite; empty if it has the one of the whole SLO."""
        return self._indicator(item, f"{item.get('displayName') or 'objective'}: ")

    def _source(self, indicator: Json) -> Json | None:
        """Query of our own metric source; None for that of another system."""
        kind, query = self._query(indicator)
        if kind == SOURCE_TYPE and isinstance(query, dict) and isinstance(query.get("volumes"), list):
            return query
        if indicator:
            of = f" of type {kind}" if kind else ""
            self._add_note(f"the metric source{of}; gateways measure latency themselves")
        return None

    def _query(self, indicator: Json) -> tuple[Any, Any]:
        """Type and query of its metric source; the type may be that of a DataSource."""
        metric, ratio = indicator.get("thresholdMetric"), indicator.get("ratioMetric")
        if not metric and isinstance(ratio, dict):
            metric = next((ratio[name] for name in _METRICS if ratio.get(name)), None)
        source = _at(metric, "metricSource")
        kind, name = _at(source, "type"), _at(source, "metricSourceRef")
        if name and (found := self._named.find("DataSource", name)) is not None:
            kind = kind or _at(found, "spec", "type")
        is_of_good = metric is indicator.get("thresholdMetric") or bool(_at(ratio, "good"))
        return kind, _at(source, "spec") if is_of_good else None

    def _scope(self, sources: list[Json | None]) -> Json:
        """That of all sources; empty where they differ, or where one says nothing of volumes."""
        ours = [each for each in sources if each is not None]
        scopes: list[Json] = [{key: each[key] for key in _SCOPE if key in each} for each in ours]
        if scopes and len(scopes) == len(sources) and all(each == scopes[0] for each in scopes):
            return scopes[0]
        if scopes and len(scopes) == len(sources):
            self._add_note(
                "its indicators are about different volumes; scope.volumes was left empty, fill it in"
            )
        else:
            self._add_note("scope.volumes is not in OpenSLO; it was left empty, fill it in")
        return {"volumes": []}

    def _control(self) -> Json:
        """Of the annotations, the one that an export of ours has."""
        given = _at(self._slo, "metadata", "annotations")
        found: Json = {}
        for key, value in given.items() if isinstance(given, dict) else ():
            if key == CONTROL and value in get_args(Control):
                found = {"control": value}
            elif key != NAME:
                self._add_note(f"annotation {key}")
        return found

    def _labels(self) -> dict[str, str]:
        labels: dict[str, str] = {}
        given = _at(self._slo, "metadata", "labels")
        for key, value in given.items() if isinstance(given, dict) else ():
            values = value if isinstance(value, list) else [value]
            labels[str(key)] = str(values[0]) if values else ""
            if len(values) > 1:
                self._add_note(f"label {key}: only its first value, {values[0]}")
        return labels

    def _objectives(self, items: list[Json], indicators: list[Json]) -> Iterator[Json]:
        """An objective for each; ``indicators``: of each."""
        method = self._spec.get("budgetingMethod")
        if method != "Timeslices":
            self._add_note(f"budgetingMethod {method}; compliance is the share of good time slices")
        taken: set[str] = set()
        for place, (item, indicator) in enumerate(zip(items, indicators, strict=True)):
            name = _name_of(item.get("displayName"), "latency" if place == 0 else f"latency-{place + 1}")
            name = name if name not in taken else f"{name}-{place + 1}"
            taken.add(name)
            if item.get("compositeWeight"):
                self._add_note(f"{name}: compositeWeight; each objective has a budget of its own")
            yield {
                "name": name,
                "indicator": {"metric": "latency", "percentile": self._percentile(name, item, method)},
                "demand_curve": self._curve(name, item, indicator),
                "budgeting": {"slice": self._slice(name, item), "target": self._target(name, item)},
            }

    def _percentile(self, name: str, item: Json, method: Any) -> float:
        share = item.get("timeSliceTarget")
        if method != "Timeslices" or not isinstance(share, int | float):
            why = "no share of good events within a slice (timeSliceTarget)"
        elif _LEAST_SHARE <= share <= _MOST_SHARE:
            return round(share * 100, 6)
        else:
            why = f"timeSliceTarget {share:g} is not from {_LEAST_SHARE:g} to {_MOST_SHARE:g}"
        self._add_note(f"{name}: {why}; percentile 95 was set")
        return 95.0

    def _curve(self, name: str, item: Json, indicator: Json) -> list[Json]:
        kind, query = self._query(indicator)
        if kind == SOURCE_TYPE and isinstance(_at(query, "demand_curve"), list):
            return list(query["demand_curve"])
        value = item.get("value")
        if indicator.get("thresholdMetric") and isinstance(value, int | float) and value > 0:
            if item.get("op") in ("lt", "lte"):
                self._add_note(
                    f"{name}: value {value:g} has no unit in OpenSLO; it was taken as milliseconds"
                )
                return [{"value_ms": float(value)}]
            self._add_note(f"{name}: op {item.get('op')}; only latencies at most (lte, lt) can be promised")
        self._add_note(f"{name}: demand_curve (the latency promised) was left empty, fill it in")
        return []

    def _slice(self, name: str, item: Json) -> str:
        window = item.get("timeSliceWindow", 1)
        seconds = round(window * 60) if isinstance(window, int | float) else _seconds(str(window))
        if seconds and seconds > 0 and 86_400 % seconds == 0:
            return format_duration(seconds)
        self._add_note(f"{name}: timeSliceWindow {window}; 1m was set, since slices divide a day")
        return "1m"

    def _target(self, name: str, item: Json) -> float | None:
        target, percent = item.get("target"), item.get("targetPercent")
        value = target if isinstance(target, int | float) else None
        if value is None and isinstance(percent, int | float):
            value = round(percent / 100, 9)
        if value is None:
            self._add_note(f"{name}: target was left empty, fill it in")
        return value

    def _window(self) -> Json:
        windows = self._spec.get("timeWindow")
        window = windows[0] if isinstance(windows, list) and windows else windows
        duration = str(_at(window, "duration") or "")
        if not duration:
            self._add_note("there is no timeWindow; a rolling window of 30d was set")
            return {"type": "rolling", "duration": "30d"}
        calendar = _at(window, "calendar")
        if isinstance(calendar, dict) and not _at(window, "isRolling"):
            return self._calendar(duration, calendar)
        seconds = _seconds(duration)
        if seconds is None:
            self._add_note(f"timeWindow {duration}; a rolling window of 30d was set")
            return {"type": "rolling", "duration": "30d"}
        if duration[-1] in _LONG_UNITS_D:
            self._add_note(f"timeWindow {duration}; it was set to {format_duration(seconds)}")
        return {"type": "rolling", "duration": format_duration(seconds)}

    def _calendar(self, duration: str, calendar: Json) -> Json:
        """A calendar window; its period is left empty where periods of ours would begin at another time."""
        period = _PERIODS.get(duration)
        zone, start = str(calendar.get("timeZone") or "UTC"), calendar.get("startTime")
        window = {"type": "calendar", "period": period, "tz": zone}
        if period is None:
            self._add_note(f"timeWindow {duration}: periods are {', '.join(_PERIODS)}; {_EMPTY_PERIOD}")
        elif start and not _begins(period, str(start)):
            begin = f"a {period} begins {_BEGINNINGS[period]}"
            self._add_note(f"timeWindow {duration} from startTime {start}: {begin}; {_EMPTY_PERIOD}")
            window["period"] = None
        return window


def _begins(period: str, start: str) -> bool:
    """Whether one of our periods begins at this local time."""
    try:
        at = datetime.fromisoformat(start)
    except ValueError:
        return False
    if at.tzinfo is not None or at.time() != time.min:
        return False
    if period == "week":
        return at.weekday() == 0
    months = {"day": None, "month": 1, "quarter": 3, "year": 12}[period]
    return months is None or (at.day == 1 and (at.month - 1) % months == 0)


def _seconds(duration: str) -> int | None:
    match = _DURATION.fullmatch(duration)
    if match is None:
        return None
    number, unit = int(match[1]), match[2]
    return number * (_LONG_UNITS_D[unit] * 86_400 if unit in _LONG_UNITS_D else UNITS_S[unit])


def _name_of(text: Any, default: str) -> str:
    """A name that we accept, made of any text."""
    name = re.sub(r"[^A-Za-z0-9._:@-]+", "-", str(text or "")).strip("-._:@")[:128]
    return name or default
