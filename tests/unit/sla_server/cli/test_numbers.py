"""Numbers on the command line: nan and infinity are none, in any option of any command."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from sla_server.cli import change
from sla_server.cli.formatting import FiniteRange
from sla_server.cli.main import cli
from sla_server.requests import ThrottleSet
from tests.support.cli import Terminal


def options(command: click.Command, path: str = "sla") -> Iterator[tuple[str, click.Parameter]]:
    for parameter in command.params:
        yield f"{path} {'/'.join(parameter.opts)}", parameter
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from options(found, f"{path} {name}")


def test_every_option_that_takes_a_fraction_takes_a_finite_one() -> None:
    plain = [
        where
        for where, parameter in options(cli)
        if isinstance(parameter.type, click.types.FloatParamType)
        and not isinstance(parameter.type, FiniteRange)
    ]
    assert plain == []


def limits(rate: str) -> tuple[float, float]:
    found = ThrottleSet.model_json_schema()["properties"][rate]["anyOf"][0]
    return found["minimum"], found.get("exclusiveMaximum", found.get("maximum"))


@pytest.mark.parametrize(
    ("option", "field", "unit"),
    [("iops", "iops", 1.0), ("mbps", "bytes_per_s", 1e6), ("cost", "cost_per_s", 1.0)],
)
def test_limits_of_throttles_are_those_of_the_api(option: str, field: str, unit: float) -> None:
    (kind,) = [p.type for p in change.throttle_set.params if p.name == option]
    assert isinstance(kind, FiniteRange)
    assert (kind.min, kind.max) == pytest.approx([limit / unit for limit in limits(field)])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--iops", "0.5"), "'--iops': '0.5' is not a number from 1 and below 1,000,000,000,000"),
        (("--iops", "nan"), "'--iops': 'nan' is not a number from 1"),
        (("--iops", "3,000"), "'3,000' is not a number from 1 and below 1,000,000,000,000; write 3000"),
        (("--mbps", "0.001"), "'--mbps': '0.001' is not a number from 0.004096"),
        (("--iops", "5", "--for", "400d"), "--for '400d' is too long; give at most 366d"),
        (
            ("--iops", "5", "--for", "5x"),
            "--for '5x' is not a duration; write for example 90s, 10m, 2h or 1d",
        ),
    ],
)
def test_a_throttle_that_the_api_would_refuse_is_refused_in_words_of_the_command(
    sla: Terminal, words: tuple[str, ...], says: str
) -> None:
    done = sla("throttle", "set", "batch", *words, "--reason", "x")
    assert done.exit_code == 2
    assert says in done.stderr.replace("\n", " ")
    assert sla.asked == []


def test_the_api_allows_a_throttle_as_long_as_the_command_does() -> None:
    found = ThrottleSet.model_json_schema()["properties"]["duration_s"]["anyOf"][0]
    assert found["maximum"] == change.MOST_THROTTLED_S
    burst = ThrottleSet.model_json_schema()["properties"]["burst_s"]["anyOf"][0]
    assert (burst["minimum"], burst["maximum"]) == (change.LEAST_BURST_S, change.MOST_BURST_S)
    weight = ThrottleSet.model_json_schema()["properties"]["volumes"]["anyOf"][0]["additionalProperties"]
    assert weight["maximum"] == change.MOST_WEIGHT
