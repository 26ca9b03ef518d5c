"""What a request to services brings about, beside the rows that are recorded of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sla_server.rows import Rows


@dataclass(slots=True)
class Act:
    """Done when its record is durable; at once where it only takes pressure off the I/O.

    Attributes:
        approval: of a second person, if it needed one; ``rows`` are its own, and go into the same record.
        what: changes by it, so that the newest is in force after a restart; "": a thing of its own.
        is_done: it was done at once.
    """

    approval: str = ""
    rows: Rows = field(default_factory=list)
    what: str = ""
    act: Callable[[], object] = lambda: None
    is_done: bool = False
