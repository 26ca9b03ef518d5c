"""Writes docs/formats/events.md from the catalogue of events: ``make docs``."""

from __future__ import annotations

import json
from pathlib import Path

from sla_server.events import catalogue, event

TARGET = Path(__file__).parents[1] / catalogue.PAGE
HEAD = """\
# Events

Generated from `sla_server/events/` by `make docs`; do not edit.

An event has an identity, a time, a kind, a severity (`info`, `warning`, `critical`), the thing it is about
(`element` and `subject`), a text for people and details with figures. It comes at least once; drop one whose
identity you have had already. Kinds that begin with `agent-` are those of an agent newer than the server.

A *condition* begins with one kind and ends with another of the same subject; recipients that know states
(Alertmanager, PagerDuty) get them as firing and resolved.
"""


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for title, kinds in catalogue.GROUPS.items():
        lines += [
            f"\n## {title}\n",
            "| kind | severity | condition | meaning | what to do |",
            "|---|---|---|---|---|",
        ]
        for name, kind in kinds.items():
            condition = f"begins {kind.begins}" if kind.begins else f"ends {kind.ends}" if kind.ends else ""
            severity = f"{kind.severity}; {kind.varies}" if kind.varies else kind.severity
            cells = (f'<a id="{name}"></a>`{name}`', severity, condition, kind.meaning, kind.action)
            lines.append(f"| {' | '.join(cells)} |")
    schema = json.dumps(event.schema(), indent=1)
    return "\n".join([*lines, "\n## JSON Schema\n", "```json", schema, "```", ""])


if __name__ == "__main__":
    TARGET.write_text(render())
