"""``sla explain``: what a field of a document means, out of the published JSON Schema.

A place in a document is ``KIND.field.field``; lists are passed through (``SLA.spec.objectives.name``). Where
the schema allows several forms, all that have the next field are followed, and shown side by side. Needs no
server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from textwrap import wrap
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import DATA_OUTPUT, WIDTH, count, print_json
from sla_server.cli.kinds import near, plural_of

DOCUMENT_KINDS: Final = ("SLA", "Maintenance", "Calendar", "VolumeLabels", "Recipient", "Route", "Silence")
"""As ``agreements.load.KINDS`` has them, which is not imported for completion; a test compares them."""
_PLURALS: Final = {
    "slas": "SLA",
    "maintenance": "Maintenance",
    "calendars": "Calendar",
    "volumelabels": "VolumeLabels",
    "recipients": "Recipient",
    "routes": "Route",
    "silences": "Silence",
}
_DURATION: Final = re.compile(r"\^.*\[smhdw\].*")
Schema = dict[str, Any]


def _place(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a place in a document, a field at a time."""
    before, dot, beginning = incomplete.rpartition(".")
    if not dot:
        return [
            CompletionItem(kind) for kind in DOCUMENT_KINDS if kind.lower().startswith(incomplete.lower())
        ]
    try:
        _title, forms, root = find(before)
    except BadUsage:
        return []
    fields = dict.fromkeys(name for form in forms for name in properties(form, root))
    return [CompletionItem(f"{before}.{name}") for name in fields if name.startswith(beginning)]


@click.command()
@click.argument("place", required=False, metavar="[KIND[.FIELD]...]", shell_complete=_place)
@click.option("--recursive", is_flag=True, help="All fields below it, a line each.")
@DATA_OUTPUT
def explain(place: str | None, recursive: bool, output: str) -> None:
    """Explain a kind of document or one of its fields: type, default, limits, meaning.

    For example: sla explain SLA, sla explain SLA.spec.objectives, sla explain Route.spec.match
    """
    if place is None:
        if output == "json":
            print_json(list(DOCUMENT_KINDS))
            return
        for kind in DOCUMENT_KINDS:
            _title, _forms, root = find(kind)
            said = (first_sentence(root["properties"][name].get("description")) for name in ("kind", "spec"))
            click.echo(f"{kind:<12} {' '.join(said)}")
        click.echo("\nFields of one: sla explain KIND; of a field: sla explain KIND.spec.FIELD")
        return
    title, forms, root = find(place)
    if output == "json":
        print_json(forms[0] if len(forms) == 1 else {"anyOf": forms})
        return
    lines = tree_lines(title, forms, root) if recursive else lines_of(title, forms, root)
    click.echo("\n".join(lines))


def find(place: str) -> tuple[str, list[Schema], Schema]:
    """The place as it is written, the schemas that it may have, and the whole schema.

    Raises:
        BadUsage: there is no such kind or field; says which is near.
    """
    word, *steps = place.replace("[]", "").split(".")
    kind = _PLURALS.get(plural_of(word)) or next(
        (each for each in DOCUMENT_KINDS if each.lower() == word.lower()), ""
    )
    if not kind:
        said = near(word, [*DOCUMENT_KINDS, *(each.lower() for each in DOCUMENT_KINDS)])
        listed = ", ".join(DOCUMENT_KINDS)
        raise BadUsage(f"{word[:40]!r} is no kind of document. {said or f'There are {listed}'}")
    root = _schema_of(kind)
    title, forms = kind, [root]
    for step in steps:
        step = re.sub(r"\[\d+\]$", "", step)
        found = [fields[step] for form in forms if step in (fields := properties(form, root))]
        if not found:
            known = dict.fromkeys(name for form in forms for name in properties(form, root))
            listed = f"It has {', '.join(known)}" if known else "It has no fields"
            raise BadUsage(f"{title} has no field {step[:40]!r}. {near(step, known) or listed}")
        title, forms = f"{title}.{step}", _distinct(found)
    return title, forms, root


@cache
def _schema_of(kind: str) -> Schema:
    """Only read."""
    from sla_server.agreements.schema import document_schema

    return document_schema(kind)


def _distinct(schemas: Sequence[Schema]) -> list[Schema]:
    found: list[Schema] = []
    for schema in schemas:
        if schema not in found:
            found.append(schema)
    return found


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema without a reference; keys beside the reference go before what it refers to."""
    while "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**root["$defs"][name], **beside}
    return schema


def forms_of(schema: Schema, root: Schema) -> list[Schema]:
    """The forms that a value may have: alternatives one by one, of a list those of its entries; no null."""
    schema = resolved(schema, root)
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        return [form for one in several for form in forms_of(one, root) if form.get("type") != "null"]
    if schema.get("type") == "array" and "items" in schema:
        return forms_of(schema["items"], root)
    return [schema]


def properties(schema: Schema, root: Schema) -> dict[str, Schema]:
    """The fields of a value with their schemas, of all its forms."""
    found: dict[str, Schema] = {}
    for form in forms_of(schema, root):
        for name, field in (form.get("properties") or {}).items():
            if name not in found:
                found[name] = field
            elif field != found[name]:
                found[name] = {"anyOf": [*found[name].get("anyOf", [found[name]]), field]}
    return found


def type_of(schema: Schema, root: Schema) -> str:
    """The type in words, with its limits."""
    schema = resolved(schema, root)
    several = [one for one in schema.get("anyOf") or schema.get("oneOf") or () if one.get("type") != "null"]
    if several:
        return " or ".join(dict.fromkeys(type_of(one, root) for one in several))
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema.get("type")
    if kind == "array":
        return f"list of {type_of(schema.get('items', {}), root)}{_range(schema, 'Items', ' entries')}"
    if kind == "object":
        if "properties" in schema:
            return "object"
        return f"map of text to text{_range(schema, 'Properties', ' entries')}"
    if kind in ("number", "integer"):
        return ("number" if kind == "number" else "whole number") + _bounds(schema)
    if kind == "string":
        if _DURATION.fullmatch(str(schema.get("pattern", ""))):
            return "duration such as 30s, 5m, 6h, 30d"
        return f"text{_range(schema, 'Length', ' characters')}"
    return {"boolean": "true or false"}.get(str(kind), "any value")


def _bounds(schema: Schema) -> str:
    words = []
    for key, word in (
        ("minimum", "from"),
        ("exclusiveMinimum", "above"),
        ("maximum", "to"),
        ("exclusiveMaximum", "below"),
    ):
        if key in schema:
            words.append(f"{word} {_number(schema[key])}")
    return f" {' '.join(words)}" if words else ""


def _number(value: float) -> str:
    return count(value) if value == int(value) else f"{value:g}"


def _range(schema: Schema, what: str, unit: str) -> str:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    if least is None and most is None:
        return ""
    if most is None:
        return f", at least {_number(least or 0)}{unit}"
    return f", {f'{_number(least)} to ' if least else 'at most '}{_number(most)}{unit}"


def default_of(schema: Schema) -> str:
    """``required``, or the default, as words; nothing if the field may just be left out."""
    if "default" not in schema or schema["default"] is None:
        return ""
    value = schema["default"]
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    return f"default {text or value}"


def first_sentence(text: Any) -> str:
    """The first paragraph of a description, without marks of the source."""
    return " ".join(str(text or "").replace("``", "").split("\n\n")[0].split())


def lines_of(title: str, forms: Sequence[Schema], root: Schema) -> Iterator[str]:
    """Everything about one place: what it is, and its fields."""
    yield title
    for form in forms:
        here = resolved(form, root)
        told = [type_of(form, root), default_of(here)] if "." in title else []
        yield from _wrapped("; ".join(filter(None, told)), "  ")
        yield from _wrapped(str(here.get("description") or "").replace("``", ""), "  ")
        if pattern := _pattern(here):
            yield f"  written as {pattern}"
    several = [one for form in forms for one in forms_of(form, root) if one.get("properties")]
    if not several:
        return
    shared = set.intersection(*(set(one["properties"]) for one in several))
    if len(several) > 1:
        yield ""
        yield "One of these forms:"
    for one in several if len(several) > 1 else ():
        yield from _wrapped(
            f"{_words(one.get('title'))}: {first_sentence(one.get('description'))}", "  ", "    "
        )
        own = [name for name in one["properties"] if name not in shared]
        if own:
            yield f"    has {', '.join(own)}"
    yield ""
    yield "Fields:"
    required = set.intersection(*(set(one.get("required") or ()) for one in several))
    merged = properties({"anyOf": several}, root)
    for name, field in merged.items():
        needed = [one for one in several if name in (one.get("required") or ())]
        place = "required" if name in required else default_of(resolved(field, root))
        if not place and needed:
            place = f"required with {', '.join(_words(one.get('title')) for one in needed)}"
        yield from _field_lines(name, field, place, root)


def _words(title: Any) -> str:
    """A title of the schema as words: LatencyObjective is latency objective."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", str(title or "").lstrip("_")).lower()


def _pattern(schema: Schema) -> str:
    pattern = str(schema.get("pattern") or "")
    return "" if not pattern or _DURATION.fullmatch(pattern) else pattern


def _field_lines(name: str, field: Schema, place: str, root: Schema) -> Iterator[str]:
    told = "; ".join(filter(None, (type_of(field, root), place)))
    yield from _wrapped(f"{name}: {told}", "  ", "      ")
    here = resolved(field, root)
    text = here.get("description") or next(
        (one["description"] for one in here.get("anyOf") or () if one.get("description")), ""
    )
    yield from _wrapped(first_sentence(text), "      ")


def _wrapped(text: str, indent: str, following: str | None = None) -> list[str]:
    hanging = indent if following is None else following
    return [
        line
        for part in text.split("\n\n")
        for line in wrap(
            " ".join(part.split()),
            WIDTH,
            initial_indent=indent,
            subsequent_indent=hanging,
            break_on_hyphens=False,
        )
    ]


def tree_lines(title: str, forms: Sequence[Schema], root: Schema) -> Iterator[str]:
    """Every field below a place, a line each with its type."""
    yield title
    yield from _branch({"anyOf": list(forms)}, root, "  ")


def _branch(schema: Schema, root: Schema, indent: str) -> Iterator[str]:
    for name, field in properties(schema, root).items():
        yield from _wrapped(f"{name}: {type_of(field, root)}", indent, f"{indent}    ")
        yield from _branch(field, root, f"{indent}  ")
