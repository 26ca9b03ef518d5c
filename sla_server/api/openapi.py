"""The table of routes, with the models of bodies and the columns of rows, as an OpenAPI 3.1 document."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

from sla_server.api.route import ANY, PREFIX, ApiRoute, Query
from sla_server.api.routes import ROUTES
from sla_server.db.queries.row_schemas import row_schema
from sla_server.events.event import schema as event_schema
from sla_server.reports.document import component_schemas
from sla_server.requests import (
    AcknowledgeBody,
    ApprovalAnswer,
    AuditNote,
    EventAgainBody,
    GatewayName,
    ModeSet,
    NewPassword,
    NewToken,
    NewUser,
    PolicyPin,
    PolicyRollback,
    ThrottleSet,
    UserChange,
    VolumesDecision,
)

SCHEMAS: Final[dict[str, Any]] = {
    "Documents": {"type": "string", "description": "YAML, see docs/formats/agreement.md"},
    "PolicyPin": PolicyPin.model_json_schema(),
    "PolicyRollback": PolicyRollback.model_json_schema(),
    "Mode": ModeSet.model_json_schema(),
    "ThrottleSet": ThrottleSet.model_json_schema(),
    "ListedGateway": GatewayName.model_json_schema(),
    "VolumesDecision": VolumesDecision.model_json_schema(),
    "Acknowledge": AcknowledgeBody.model_json_schema(),
    "EventAgain": EventAgainBody.model_json_schema(),
    "AuditNote": AuditNote.model_json_schema(),
    "ApprovalAnswer": ApprovalAnswer.model_json_schema(),
    "NewUser": NewUser.model_json_schema(),
    "UserChange": UserChange.model_json_schema(),
    "NewToken": NewToken.model_json_schema(),
    "NewPassword": NewPassword.model_json_schema(),
    "Event": {**event_schema(), "required": ["kind"]},  # the preview fills in the rest
    **component_schemas(),
    "Verification": {
        "type": "object",
        "required": ["report_id", "is_good", "findings", "checked", "left_out"],
        "properties": {
            "report_id": {"type": "string"},
            "is_good": {"type": "boolean"},
            "findings": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["meaning", "where", "text"],
                    "properties": {
                        "meaning": {
                            "type": "string",
                            "enum": ["broken", "differs", "raw", "superseded", "gone"],
                        },
                        "where": {"type": "string"},
                        "text": {"type": "string"},
                    },
                },
            },
            "checked": {"type": "array", "items": {"type": "string"}},
            "left_out": {"type": "integer"},
        },
    },
    "Health": {
        "type": "object",
        "required": ["status", "database", "services", "problems", "snapshot_age_s", "fullness", "version"],
        "properties": {
            "status": {"type": "string", "enum": ["ok", "degraded", "down"]},
            "database": {"type": "string", "description": "ok, or why it cannot be read"},
            "services": {"type": "string", "description": "ok, or what is wrong with them"},
            "problems": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["process", "what", "since_us", "reason"],
                    "properties": {
                        "process": {"type": "string"},
                        "what": {"type": "string"},
                        "since_us": {"type": ["integer", "null"]},
                        "reason": {"type": "string"},
                    },
                },
            },
            "snapshot_age_s": {"type": ["number", "null"]},
            "fullness": {
                "type": "object",
                "description": "Queues and mailboxes, PROCESS/NAME to the share in use",
                "additionalProperties": {"type": "number"},
            },
            "version": {"type": "string"},
            "acting": {
                "type": ["string", "null"],
                "description": "Of several servers the node whose server acts, if that is known",
            },
            "acting_page": {"type": ["string", "null"], "description": "Where the page of that server is"},
            "stands_by": {"type": "string", "description": "Why this server does not act; empty if it does"},
            "pages": {
                "type": "object",
                "description": "Pages of the other servers, by node",
                "additionalProperties": {"type": "string"},
            },
        },
    },
    "Alive": {
        "type": "object",
        "required": ["alive"],
        "properties": {"alive": {"type": "boolean", "const": True}},
    },
    "Ready": {
        "type": "object",
        "required": ["ready", "waits_for"],
        "properties": {
            "ready": {"type": "boolean"},
            "waits_for": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["process", "reason"],
                    "properties": {"process": {"type": "string"}, "reason": {"type": "string"}},
                },
            },
        },
    },
    "Sizes": {
        "type": "object",
        "required": ["kind", "bytes", "tables"],
        "properties": {
            "kind": {"type": "string", "enum": ["postgresql", "sqlite"]},
            "bytes": {"type": "integer"},
            "tables": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["table", "rows", "has_more", "bytes"],
                    "properties": {
                        "table": {"type": "string"},
                        "rows": {"type": "integer"},
                        "has_more": {"type": "boolean", "description": "there are more than were counted"},
                        "bytes": {"type": ["integer", "null"]},
                    },
                },
            },
        },
    },
    "Explanation": {
        "type": "object",
        "required": ["kind", "name", "at_us", "is_now", "status", "headline", "sections", "facts"],
        "properties": {
            "kind": {"type": "string", "enum": ["volume", "sla"]},
            "name": {"type": "string"},
            "at_us": {"type": "integer"},
            "is_now": {"type": "boolean"},
            "status": {
                "type": "string",
                "description": "e.g. throttled, observed, free, at-risk, violated, kept",
            },
            "headline": {"type": "string"},
            "sections": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["title", "lines"],
                    "properties": {
                        "title": {"type": "string"},
                        "lines": {"type": "array", "items": {"type": "string"}},
                    },
                },
            },
            "facts": {"type": "object", "description": "The rows that the text was made from"},
        },
    },
    "Problem": {
        "type": "object",
        "description": "RFC 9457; `fix` says what to do next.",
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "fix": {"type": "string"},
            "errors": {"type": "array", "items": {"type": "object"}},
        },
    },
}
_BODY_TYPES: Final = {"Documents": "application/yaml"}
_PROBLEM: Final = {
    "description": "Refused; the body says why and what to do",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
_ACCEPTED: Final = {
    "description": "Asked, no answer yet; Location names the operation",
    "headers": {"Location": {"schema": {"type": "string"}}},
}


def document() -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(PREFIX + route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Storage SLA server",
            "version": version("storage-sla-server"),
            "description": "Times are integers, microseconds UTC. Reading is open on this machine; changes "
            "need the bearer token or a session.",
        },
        "paths": paths,
        "components": {
            "schemas": {**SCHEMAS, **_row_schemas()},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "sla_session_PORT"},
            },
        },
    }


def _operation(route: ApiRoute) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.parameters
    ] + [
        {
            "name": query.name,
            "in": "query",
            "required": query.required,
            "description": query.about,
            "schema": _value(query),
        }
        for query in route.query
    ]
    done = {route.answer: _answer(route)}
    described: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.about,
        "parameters": parameters,
        "responses": {"200": {"description": "Done", "content": done}, "default": _PROBLEM},
    }
    for status in route.also:
        described["responses"][str(status)] = {
            "description": "Not well; the body is the same",
            "content": done,
        }
    if route.empty:
        described["responses"]["204"] = {"description": "Nothing newer"}
    if route.method == "GET" and route.answer == "application/json":
        described["responses"]["304"] = {"description": "As the ETag in If-None-Match says"}
    if route.body:
        described["requestBody"] = {
            "required": True,
            "content": {_BODY_TYPES.get(route.body, "application/json"): _schema(route.body)},
        }
    if route.changes:
        described["security"] = [{"token": []}, {"session": []}]
        described["responses"]["202"] = _ACCEPTED
    return described


def _row_schemas() -> dict[str, Any]:
    """Name to schema of the rows that lists have."""
    tables = sorted({route.items for route in ROUTES} - {"", ANY})
    return {_row_name(table): row_schema(table) for table in tables}


def _row_name(table: str) -> str:
    return "".join(word.capitalize() for word in table.split("_")) + "Row"


def _answer(route: ApiRoute) -> dict[str, Any]:
    """The content of the answer that says that it was done."""
    if route.schema:
        return _schema(route.schema)
    if route.answer != "application/json":
        return {"schema": {"type": "string"}}
    if not route.items:
        return {"schema": {"type": "object"}}
    row = {"type": "object"} if route.items == ANY else _schema(_row_name(route.items))["schema"]
    return {
        "schema": {
            "type": "object",
            "required": ["items", "next"],
            "properties": {
                "items": {"type": "array", "items": row},
                "next": {
                    "type": ["string", "null"],
                    "description": "For the next page, in the parameter `after`, `before` or `from_us`.",
                },
            },
        }
    }


def _value(query: Query) -> dict[str, Any]:
    if query.kind == "boolean":
        return {"type": "string", "enum": ["0", "1", "false", "true"]}
    schema: dict[str, Any] = {"type": query.kind}
    if query.kind == "string":
        schema["minLength"] = 1
    if query.least is not None:
        schema["minimum"] = query.least
    if query.most is not None:
        schema["maximum"] = query.most
    return schema


def _schema(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}
