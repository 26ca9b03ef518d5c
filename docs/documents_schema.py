"""Writes docs/formats/documents.schema.json from the models of the documents: ``make docs``."""

from __future__ import annotations

import json
from pathlib import Path

from sla_server.agreements.schema import document_schema

TARGET = Path(__file__).parent / "formats" / "documents.schema.json"


def render() -> str:
    """The whole file."""
    return json.dumps(document_schema(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
