"""The event's form, and the catalogue: every kind that the product raises is in it."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.events import render
from pmdaemon.reserve.raising import TOLD_APART
from pmdaemon.wire.messages.alerts import ALERT_KINDS
from sla_server.cli.explain import DOCUMENT_KINDS
from sla_server.events import catalogue
from sla_server.events.event import SEVERITIES, Event, EventUnreadable, from_row, parse, schema
from sla_server.events.recipients.base import Notice, Status

ROOT = Path(__file__).parents[4]
KIND = re.compile(r"[a-z]+(?:-[a-z]+)+|infeasible|unattributed")
RAISERS = {
    "event_row",
    "_event",
    "RaiseEvent",
    "event",
    "_add_event",
    "_part_event",
    "_report",
    "_new_access",
}
NO_KINDS = {"process-id"}
STATES = ("up", "lost", "stalled", "recovered", "stopped", "refused", "detached")


def event(**changed: Any) -> Event:
    values = {
        "event_id": "e1", "at_us": 5, "kind": "violation-opened", "severity": "critical", "element": "sla",
        "subject": "gold/latency", "text": "gold is broken", "details": {"u": 1.5},
    }  # fmt: skip
    return Event(**{**values, **changed})


def test_an_event_is_the_same_behind_its_codec() -> None:
    there = event(source="services", recorded_us=9)
    assert parse(there.encode()) == there
    assert set(there.as_json()) == set(schema()["properties"])
    assert set(schema()["required"]) == set(there.row())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("event_id", "", "'event_id' is ''"),
        ("at_us", "now", "'at_us' is 'now'"),
        ("kind", None, "'kind' is None"),
        ("severity", "fatal", "'severity' is 'fatal', expected one of info, warning, critical"),
        ("details", 7, "'details' is 7"),
    ],
)
def test_what_is_no_event_is_refused_with_the_field_and_its_value(field: str, value: Any, said: str) -> None:
    with pytest.raises(EventUnreadable, match=re.escape(said)):
        from_row({**event().row(), field: value})


def test_long_and_unprintable_texts_are_cut() -> None:
    found = from_row({**event().row(), "text": "\x1b[31m" + "a" * 9000, "details": {"a": "b" * 99_000}})
    assert len(found.text) == 2000
    assert "\x1b" not in found.text
    assert set(found.details) == {"cut"}


def test_an_event_of_a_former_release_is_critical_where_it_said_error() -> None:
    assert from_row({**event().row(), "severity": "error"}).severity == "critical"


def test_what_an_event_is_about() -> None:
    assert event().agreement == "gold"
    assert event(element="gateway", subject="gw-1").gateway == "gw-1"
    assert event(details={"volume": "v1", "agreement": "a"}).volume == "v1"


def test_the_identity_of_a_delivery_counts_reminders() -> None:
    assert Notice(event(), "mail", 1).delivery_id == "e1"
    assert Notice(event(), "mail", 2, reminder=3).delivery_id == "e1/3"
    assert Notice(event(), "mail", 3, escalated=True).delivery_id == "e1/escalated"
    assert json.loads(json.dumps(Notice(event(), "mail", 1).as_json()))["event"]["kind"] == "violation-opened"


def test_begin_and_end_of_a_condition_have_one_key() -> None:
    opened, closed = event(), event(kind="violation-closed", event_id="e2")
    assert catalogue.condition_key(opened) == catalogue.condition_key(closed)
    assert catalogue.status_of(opened) is Status.FIRING
    assert catalogue.status_of(closed) is Status.RESOLVED
    fast, slow = (event(kind="burn-rate", details={"alert": alert}) for alert in ("fast", "slow"))
    assert catalogue.condition_key(fast) != catalogue.condition_key(slow)


def test_each_condition_that_ends_begins() -> None:
    begun = {kind.begins for kind in catalogue.KINDS.values()} - {""}
    assert begun == {kind.ends for kind in catalogue.KINDS.values()} - {""}


def test_no_kind_is_in_two_groups() -> None:
    assert len(catalogue.KINDS) == sum(len(group) for group in catalogue.GROUPS.values())


CALLS = {*RAISERS, "tell", "_raise"}
MAY_RAISE = re.compile(rf"""\b(?:{"|".join(CALLS)})\s*\(|["']kind["']\s*:""")


@functools.cache
def nodes(path: Path) -> tuple[ast.Dict | ast.Call, ...]:
    """Of a file that can have one that is looked for: to read all 700 takes 3 s."""
    text = path.read_text()
    found = ast.walk(ast.parse(text)) if MAY_RAISE.search(text) else ()
    return tuple(node for node in found if isinstance(node, ast.Dict | ast.Call))


def raised_in(path: Path) -> Iterator[str]:
    """Kinds in the calls that raise events: constants among the first arguments, also of conditions."""
    for node in nodes(path):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "kind":
                    yield from constants(value)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in RAISERS:
                for argument in node.args[:4]:
                    yield from constants(argument)


def constants(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and KIND.fullmatch(each.value):
            yield each.value


def test_every_kind_that_the_product_raises_is_in_the_catalogue() -> None:
    paths = [path for package in ("sla_server", "pmdaemon") for path in (ROOT / package).rglob("*.py")]
    paths = [path for path in paths if "reserve" not in path.parts and "cli" not in path.parts]
    found = {kind for path in paths for kind in raised_in(path)} - NO_KINDS
    assert len(found) > 40  # the search finds them
    assert {kind for kind in found if not catalogue.is_known(kind)} == set()
    assert {kind for kind in ALERT_KINDS if not catalogue.is_known(kind)} == set()
    assert {state for state in STATES if f"gateway-{state}" not in catalogue.KINDS} == set()


def raised_with(path: Path) -> Iterator[tuple[str, str]]:
    """Kind and severity of the calls that name both, of agents' alerts, too."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in CALLS:
                words = [each.value for each in node.args if isinstance(each, ast.Constant)]
                kinds = [word for word in words if word in catalogue.KINDS]
                severities = [word for word in words if word in SEVERITIES]
                yield from zip(kinds, severities, strict=False)


def test_kinds_are_raised_with_severities_of_the_catalogue() -> None:
    packages = ("sla_server", "pmdaemon", "gateway_agent")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    found = {pair for path in paths for pair in raised_with(path)}
    assert len(found) > 40  # the search finds them
    assert {
        (kind, severity) for kind, severity in found if severity not in catalogue.KINDS[kind].severities
    } == set()


@pytest.mark.parametrize("kind", ["unattributed", "infeasible", "control-oscillation"])
def test_what_control_finds_is_critical_once_the_promise_is_broken(kind: str) -> None:
    assert catalogue.KINDS[kind].severities == ("warning", "critical")


def test_conditions_that_a_detail_tells_apart_are_never_folded_into_one() -> None:
    assert {kind.by for kind in catalogue.KINDS.values() if kind.by} <= set(TOLD_APART)


def test_the_page_has_a_severity_that_varies() -> None:
    line = next(line for line in render().splitlines() if 'id="unattributed"' in line)
    assert "| warning; critical while the promise is broken |" in line


def elements_in(path: Path) -> Iterator[str]:
    """Kinds of thing that events are about, where the calls that make events name them."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            named = [each.value for each in node.keywords if each.arg == "element"]
            if name in ("event_row", "RaiseEvent"):
                for place in named or node.args[2:3]:
                    yield from (
                        each.value
                        for each in ast.walk(place)
                        if isinstance(each, ast.Constant) and isinstance(each.value, str)
                    )


def test_what_events_are_about_is_one_of_the_known_kinds_of_thing() -> None:
    """By which the inbox is filtered: one that is missing there could not be asked for."""
    paths = [path for package in ("sla_server", "pmdaemon") for path in (ROOT / package).rglob("*.py")]
    found = {element for path in paths for element in elements_in(path)}
    documents = {kind.lower() for kind in DOCUMENT_KINDS} - {"sla"}
    assert found | documents | {"group", "client"} == set(catalogue.ELEMENTS)
