"""JSON Schema of all kinds of documents, for editors and for programs that write documents.

It says what one document looks like; what holds between its fields (curves rise, windows end after they
start) and between documents is checked when they are applied. docs/formats/documents.schema.json is this,
written by ``python -m docs.documents_schema``.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from sla_server.agreements.fields import Document

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
MODELS: Final = {
    "SLA": "document:Agreement",
    "Maintenance": "maintenance:MaintenanceDocument",
    "Calendar": "calendars:CalendarDocument",
    "VolumeLabels": "volume_labels:VolumeLabelsDocument",
}
"""Kind -> its model in this package: ``sla explain`` of one kind does not import the others."""


def document_schema(kind: str | None = None) -> dict[str, Any]:
    """The schema of one kind, or of all: a document is then exactly one of them.

    Raises:
        KeyError: there is no such kind.
    """
    if kind is not None:
        return {"$schema": DIALECT, "title": kind, **_model_of(kind).model_json_schema(by_alias=True)}
    from pydantic.json_schema import models_json_schema

    from sla_server.agreements.load import KINDS

    references, schema = models_json_schema(
        [(model, "validation") for model in KINDS.values()], by_alias=True, title="Storage SLA documents"
    )
    one_of = [references[model, "validation"] for model in KINDS.values()]
    return {"$schema": DIALECT, **schema, "oneOf": one_of}


def _model_of(kind: str) -> type[Document]:
    module, _, name = MODELS.get(kind, "").partition(":")
    if not module:
        from sla_server.agreements.load import KINDS

        return KINDS[kind]
    found: type[Document] = getattr(importlib.import_module(f"sla_server.agreements.{module}"), name)
    return found
