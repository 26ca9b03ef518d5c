"""Acquirable parameters: one value for the whole cluster, changed while all nodes run (C14). Pure.

They are in no file that an operator edits. ``sla cluster config set`` changes them on all nodes at once; a
node that starts asks those that run (``documents``). Essential parameters (``essentials``) are the other
kind: they are edited by hand, and only while no node runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from sla_server.cluster.errors import BadParameter

Value = int | str
DOCUMENT: Final = "parameters"
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of them.

    Attributes:
        default: what holds until it is set; its type is that of all values.
        least, most: of numbers.
        choices: of texts.
        meaning: one sentence.
    """

    default: Value
    meaning: str
    least: int = 0
    most: int = 0
    choices: tuple[str, ...] = ()

    def problem(self, value: object) -> str:
        """Why ``value`` cannot be it; "" if it can."""
        if self.choices:
            return "" if value in self.choices else f"it must be one of {', '.join(self.choices)}"
        if not isinstance(value, int) or isinstance(value, bool):
            return "it must be a whole number"
        return "" if self.least <= value <= self.most else f"it must be from {self.least} to {self.most}"


PARAMETERS: Final[Mapping[str, Parameter]] = MappingProxyType(
    {
        "log_age_s": Parameter(7 * 86_400, "So long `_LOG` keeps a record.", least=3600, most=365 * 86_400),
        "log_bytes": Parameter(64 * MIB, "Room for `_LOG` on each node that has a copy.", MIB, 1 << 40),
        "log_level": Parameter(
            "info", "The least level that goes into `_LOG`.", choices=("debug", "info", "warning", "error")
        ),
        "max_connections": Parameter(65_536, "Clients of one node, at most.", 16, 1_000_000),
        "ping_interval_s": Parameter(
            10, "A client that is gone without a word is noticed after two of them.", 1, 3600
        ),
        "write_deadline_s": Parameter(10, "A client that takes nothing for so long is disconnected.", 1, 600),
    }
)


def values(found: Mapping[str, object]) -> dict[str, Value]:
    """Every parameter: as ``found``, or its default.

    What this release does not know, or would refuse, is passed over: a later one may have set it.
    """
    return {
        name: found[name]  # type: ignore[misc] # ``problem`` has seen that it is a value
        if name in found and not parameter.problem(found[name])
        else parameter.default
        for name, parameter in PARAMETERS.items()
    }


def parse(assignments: Iterable[str]) -> dict[str, Value]:
    """``NAME=VALUE`` each.

    Raises:
        BadParameter: with the name, the value and what it may be.
    """
    made: dict[str, Value] = {}
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise BadParameter(name, "", "write NAME=VALUE")
        if name not in PARAMETERS:
            raise BadParameter(name, text, f"acquirable parameters are {', '.join(PARAMETERS)}")
        parameter = PARAMETERS[name]
        value: Value = int(text) if not parameter.choices and text.isascii() and text.isdigit() else text
        if problem := parameter.problem(value):
            raise BadParameter(name, text, problem)
        made[name] = value
    return made
