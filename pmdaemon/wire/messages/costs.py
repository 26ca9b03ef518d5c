"""COSTS: what an I/O costs each backend, as it was fitted to what is stored. Checked for the agent.

Only agents with the feature ``fitted-costs`` are sent it; those of before go on with the constants. It asks
for no answer and has no lease: what it says holds until other costs come, also while the server is away.

Pure. Source: docs/formats/messages.md; SLA-MODEL.md 4, point 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import Header, Key, WireMessage, name, rows, whole

FITTED_COSTS: Final = "fitted-costs"
"""Feature of an agent: it takes COSTS."""
MAX_BACKENDS: Final = 256  # names of 128 bytes, and the header stays below 64 KiB
COST_BYTES_RANGE: Final = (512.0, 1e9)  # of ``[[export]] cost_bytes``
COST_WRITE_RANGE: Final = (0.001, 1e3)
COSTS_FORM: Final = "[{backend: str, cost_write: float | nil, cost_bytes: float}]"


@dataclass(frozen=True, slots=True)
class Costs(WireMessage):
    """What an I/O costs on the backends of this gateway, complete: another one has the costs of its export.

    In units of a read before its bytes are added: a write costs ``cost_write`` (nil: no writes were seen),
    and ``cost_bytes`` bytes cost 1. Exports with `cost = "fitted"` charge it from now on, but
    those whose cost a cap of the server limits when that has gone. ``version`` is that of the policy that
    fitted them. Sent to agents with the feature ``fitted-costs`` only, when they register
    and when it changes.
    """

    KIND: ClassVar = Kind.COSTS
    version: int
    backends: Annotated[tuple[Header, ...], Key(form=COSTS_FORM)]

    @classmethod
    def parse(cls, header: Header) -> Costs:
        """Check a header.

        Raises:
            MalformedFrame: names the key, the backend and the value.
            FrameTooLarge: more than ``MAX_BACKENDS``.
        """
        found: dict[str, Header] = {}
        for entry in rows(header, "COSTS", "backends", MAX_BACKENDS):
            if not isinstance(entry, dict):
                raise MalformedFrame(f"COSTS: key 'backends' has {excerpt(entry)}, expected maps")
            backend = name(entry, "COSTS", "backend")
            write = entry.get("cost_write")
            found[backend] = {
                "backend": backend,
                "cost_write": None if write is None else _number(entry, "cost_write", *COST_WRITE_RANGE),
                "cost_bytes": _number(entry, "cost_bytes", *COST_BYTES_RANGE),
            }
        return cls(whole(header, "COSTS", "version", 0, (1 << 63) - 1), tuple(found.values()))


def _number(entry: Header, key: str, low: float, high: float) -> float:
    value: Any = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        whose = excerpt(entry["backend"])
        raise MalformedFrame(
            f"COSTS: {key} of {whose} is {excerpt(value)}, expected a number from {low:g} to {high:g}"
        )
    return float(value)
