"""Writes docs/formats/report.schema.json from the models of reports: ``make docs``."""

from __future__ import annotations

import json
from pathlib import Path

from sla_server.reports.document import report_schema

TARGET = Path(__file__).parent / "formats" / "report.schema.json"


def render() -> str:
    """The whole file."""
    return json.dumps(report_schema(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
