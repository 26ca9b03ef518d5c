"""Writes docs/operations/configuration.md from the configuration models: ``make docs``."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gateway_agent.config import AgentConfig
from sla_server.config import ServerConfig
from sla_server.relay.config import RelayConfig

TARGET = Path(__file__).parent / "operations" / "configuration.md"
HEAD = """\
# Configuration reference

Generated from the models by `make docs`; do not edit. Files are TOML; unknown keys are errors.
`SLA__SECTION__KEY=value` in the environment overrides a key of the server's file, `SLA_AGENT__KEY=value` one
of the agent's (`SLA_AGENT__SECTION__KEY` in a table), `SLA_RELAY__KEY=value` one of a relay's.
`--show-config` prints the values in force, `--check-config` only checks.
"""


def table(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Rows of one model, then the tables of the models inside it."""
    title = f"`[{prefix}]`" if prefix else "(top of the file)"
    rows = [f"\n## {title}\n", "| key | default | meaning |", "|---|---|---|"]
    inner: list[str] = []
    meaning_of = meanings(model)
    for name, field in model.model_fields.items():
        inside = _model_of(field.annotation)
        if inside is not None:
            inner += table(inside, f"{prefix}.{name}" if prefix else name)
            continue
        if field.default is not PydanticUndefined:
            default = "required" if field.is_required() else f"`{field.default}`"
        else:
            default = "required" if field.is_required() else "(computed)"
        meaning = " ".join(meaning_of.get(name, "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {default} | {meaning} |")
    return rows + inner if len(rows) > 3 else inner


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """What stands below each field of a model, its bases' included.

    pydantic could find it when the class is made; that took every process longer than reading its file.
    """
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in pairwise(definition.body):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                    found[field.target.id] = inspect.cleandoc(str(below.value.value))
    return found


def _model_of(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)


def render() -> str:
    """The whole page."""
    parts = [HEAD, "\n# Server: `sla-server start --config FILE`", *table(ServerConfig)]
    parts += ["\n# Relay: `sla-server relay --config FILE`", *table(RelayConfig)]
    parts += ["\n# Agent: `gateway-agent run --config FILE`", *table(AgentConfig)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
