"""YAML text to documents (agreements, maintenance, calendars, delivery), with every mistake at its line.

One text may hold several documents (``---``). Nothing is returned unless all of them are right. The text is
bounded (size, number of values, depth), so a hostile file costs little; anchors are allowed, but what they
expand to is counted.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, DocumentEndEvent, DocumentStartEvent
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from sla_server.agreements.calendars import CalendarDocument
from sla_server.agreements.document import METRICS, Agreement
from sla_server.agreements.errors import AgreementsRefused, DocumentProblem, double_named
from sla_server.agreements.fields import NEW, Document, format_duration, shown
from sla_server.agreements.limits import MAX_DOCUMENTS
from sla_server.agreements.maintenance import MaintenanceDocument
from sla_server.agreements.numbers import number_and_unit, plain, scaled
from sla_server.agreements.volume_labels import VolumeLabelsDocument
from sla_server.events.documents import RecipientDocument, RouteDocument, SilenceDocument

MAX_TEXT_BYTES: Final = 256 << 10
MAX_DOCUMENT_BYTES: Final = 24 << 10  # text and JSON of one agreement travel in one 64 KiB frame header
MAX_SPEC_BYTES: Final = 36 << 10  # anchors can make the JSON longer than the text
MAX_VALUES: Final = 5_000
MAX_DEPTH: Final = 20  # an agreement needs 7; the scanner's time grows with the square of it
# What the parser raises for texts that are no YAML: beside its own errors those of the converters it calls
# (KeyError for "!!bool x", AttributeError for an anchor that merges itself).
NOT_YAML: Final = (
    YAMLError,
    RecursionError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    OverflowError,
)
_BLANK_LINES: Final = re.compile(r"\A(?:[ \t]*\r?\n)+")  # not the indentation of the first line
KINDS: Final[dict[str, type[Document]]] = {
    "SLA": Agreement,
    "Maintenance": MaintenanceDocument,
    "Calendar": CalendarDocument,
    "VolumeLabels": VolumeLabelsDocument,
    "Recipient": RecipientDocument,
    "Route": RouteDocument,
    "Silence": SilenceDocument,
}
"""Kind of document -> its model."""
_UNION_TAGS: Final = frozenset((*METRICS, "calendar", "rolling"))


@dataclass(frozen=True, slots=True)
class Loaded:
    """One document that is right in itself.

    Attributes:
        line: 1-based line of its first key in the text given
        text: its own YAML, without its neighbours
        notes: what is missing outside of it for it to work; who reads it may add some
    """

    document: Document
    text: str
    line: int
    notes: tuple[str, ...] = ()

    @property
    def agreement(self) -> Agreement:
        """The document, where only agreements are expected.

        Raises:
            TypeError: it is of another kind.
        """
        if not isinstance(self.document, Agreement):
            raise TypeError(f"{self.document.kind} {self.document.name} is no agreement")
        return self.document


def load_documents(text: str, rollup_s: int) -> list[Loaded]:
    """Read and check every document of ``text``; empty ones are skipped.

    Args:
        text: YAML.
        rollup_s: rollup interval of the database in seconds; slices are whole multiples of it.

    Raises:
        AgreementsRefused: with every problem found.
    """
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise AgreementsRefused(
            [DocumentProblem(0, "", "the text is larger than 256 KiB", "Apply the documents in parts")]
        )
    problems: list[DocumentProblem] = []
    loaded: list[Loaded] = []
    for part, offset in _split(text):
        try:
            item = _one(part, offset, rollup_s)
        except AgreementsRefused as exc:
            problems.extend(exc.problems)
        else:
            if item is not None:
                loaded.append(item)
    problems.extend(_doubles(loaded))
    if not loaded and not problems:
        problems.append(
            DocumentProblem(0, "", "there is no document in the text", "See docs/formats/agreement.md")
        )
    if problems:
        raise AgreementsRefused(problems)
    return loaded


def _split(text: str) -> Iterator[tuple[str, int]]:
    """Each document's own text and the number of lines before it."""
    spans: list[tuple[int, int]] = []
    start = depth = 0
    try:
        for event in YAML(typ="rt", pure=True).parse(text):
            if isinstance(event, DocumentStartEvent):
                # The whole line: where a document is indented, the first line's indentation belongs to it.
                start = event.start_mark.index - event.start_mark.column
            elif isinstance(event, DocumentEndEvent):
                spans.append((start, event.end_mark.index))
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1
                raise AgreementsRefused(
                    [DocumentProblem(line, "", "the YAML is nested too deeply", "Remove brackets")]
                )
    except NOT_YAML as exc:
        raise AgreementsRefused([syntax_problem(exc, 0)]) from exc
    if len(spans) > MAX_DOCUMENTS:
        raise AgreementsRefused(
            [DocumentProblem(0, "", f"more than {MAX_DOCUMENTS} documents", "Apply them in parts")]
        )
    for first, last in spans:
        yield text[first:last], text.count("\n", 0, first)


def syntax_problem(error: Exception, offset: int = 0, text: str = "") -> DocumentProblem:
    """What one of ``NOT_YAML`` says, at its line.

    Args:
        error: of the reader, or of a converter of values that it calls.
        offset: lines before the text that was read.
        text: that text; a converter does not say where the value is.
    """
    if isinstance(error, RecursionError):
        return DocumentProblem(0, "", "the YAML is nested too deeply")
    odd = None if isinstance(error, MarkedYAMLError) else _odd_value(text)
    if odd is not None:
        line, value, is_date = odd
        if is_date:
            return DocumentProblem(
                line + offset,
                "",
                f"{shown(value)} does not exist: no such day, hour or minute",
                "Write one that does",
            )
        problem = f"{shown(value)} does not fit the tag or the form that it is written in"
        if "digits" in str(error):
            problem = "a number has thousands of digits"
        return DocumentProblem(line + offset, "", problem, "Correct it, or write it in quotes")
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    line = mark.line + 1 + offset if mark is not None else 0
    if isinstance(error, DuplicateKeyError):
        key = str(error.problem).partition('"')[2].partition('"')[0]
        return DocumentProblem(line, "", f"the key {key} is there twice", "Keep one of the two")
    fix = "Check indentation, colons and quotes on this line"
    if isinstance(error, MarkedYAMLError) and "alias" in str(error.context):
        fix = 'Put a pattern in quotes: "*". Without them * names an anchor'
    if "'\\t'" in _reason(error):
        return DocumentProblem(line, "", "a tab cannot indent in YAML", "Write spaces in its place")
    return DocumentProblem(line, "", f"this is not YAML: {_reason(error)}", fix)


def _odd_value(text: str) -> tuple[int, str, bool] | None:
    """Line and text of the first value that no converter takes, and whether it has the form of a date."""
    try:
        waiting = [YAML(typ="rt", pure=True).compose(text)]
    except NOT_YAML:
        return None
    seen = set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, MappingNode):
            waiting += [part for pair in reversed(node.value) for part in reversed(pair)]
        elif isinstance(node, SequenceNode):
            waiting += reversed(node.value)
        elif isinstance(node, ScalarNode) and node.tag != _TEXT_TAG:
            try:
                YAML(typ="rt", pure=True).load(f"!<{node.tag}> {json.dumps(node.value)}")
            except NOT_YAML:
                return node.start_mark.line + 1, str(node.value), str(node.tag).endswith(":timestamp")
    return None


_TEXT_TAG: Final = "tag:yaml.org,2002:str"


def _reason(error: Exception) -> str:
    """Why a text is no YAML; what is not an error of the reader comes from a value that it converts."""
    if isinstance(error, MarkedYAMLError) and error.problem:
        if "'<document start>'" in error.problem:
            return "this belongs to no key; each line has the form key: value"
        return str(error.problem)
    if isinstance(error, YAMLError) and str(error):
        return str(error).splitlines()[0]
    if isinstance(error, ValueError) and "digits" in str(error):
        return "a number has thousands of digits"
    return "a value does not fit the tag or the form that it is written in"


def _one(text: str, offset: int, rollup_s: int) -> Loaded | None:
    try:
        tree = YAML(typ="rt", pure=True).load(text)
    except NOT_YAML as exc:
        raise AgreementsRefused([syntax_problem(exc, offset, text)]) from exc
    if tree is None:
        return None
    if not isinstance(tree, dict):
        raise AgreementsRefused(
            [DocumentProblem(offset + 1, "", "a document is a map", "Begin with apiVersion: storage-sla/v1")]
        )
    line = _line_of(tree, (), offset)
    if len(text.encode()) > MAX_DOCUMENT_BYTES:
        raise AgreementsRefused(
            [
                DocumentProblem(
                    line, "", "the document is larger than 24 KiB", "Split it into several agreements"
                )
            ]
        )
    plain = _plain(tree, [MAX_VALUES])
    kind = plain.get("kind")
    model = KINDS.get(kind, Agreement) if isinstance(kind, str) else Agreement
    try:
        document = model.model_validate(plain, context=NEW)
    except ValidationError as exc:
        raise AgreementsRefused(_describe(exc, tree, offset, _name_in(plain), model)) from exc
    problems = _slices_fit(document, tree, offset, rollup_s) if isinstance(document, Agreement) else []
    if len(json.dumps(document.spec_json())) > MAX_SPEC_BYTES:
        problems.append(
            DocumentProblem(line, "", "the document expands to more than 36 KiB", "Split it", document.name)
        )
    if problems:
        raise AgreementsRefused(problems)
    return Loaded(document, _BLANK_LINES.sub("", text).rstrip() + "\n", line)


def _plain(value: Any, left: list[int], depth: int = 0) -> Any:
    """Dicts, lists and scalars of Python's own; ``left`` counts down what a text may expand to."""
    left[0] -= 1
    if depth > MAX_DEPTH:  # only by an anchor: the reader counts what is written
        problem = f"a document nests more than {MAX_DEPTH} deep: an anchor contains its own alias"
        raise AgreementsRefused([DocumentProblem(0, "", problem, "Write the value out instead of the alias")])
    if left[0] < 0:
        raise AgreementsRefused(
            [DocumentProblem(0, "", f"a document has more than {MAX_VALUES} values", "Split it")]
        )
    if isinstance(value, dict):
        return {_key_text(key): _plain(item, left, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, left, depth + 1) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _key_text(key: Any) -> str:
    """A key as it is written; YAML allows keys that are no text."""
    if isinstance(key, str):
        return str(key)
    return shown(dict(key) if isinstance(key, dict) else list(key) if isinstance(key, tuple) else key)


def _name_in(plain: dict[str, Any]) -> str:
    metadata = plain.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _describe(
    error: ValidationError, tree: Any, offset: int, name: str, model: type[Document]
) -> list[DocumentProblem]:
    problems = []
    for item in error.errors(include_url=False):
        path = _without_tags(item["loc"])
        if key := item.get("ctx", {}).get("key"):
            path = (*path, *_parts_of(key))  # a validator of the whole model found it in one of its keys
        problem, fix = explain(item, path, model)
        problems.append(DocumentProblem(_line_of(tree, path, offset), _dotted(path), problem, fix, name))
    return sorted(problems, key=lambda entry: entry.line)


def _parts_of(key: str) -> list[int | str]:
    """``demand_curve[1].value_ms`` as a path."""
    return [int(part) if part.isdecimal() else part for part in _KEY_PARTS.findall(key)]


_KEY_PARTS: Final = re.compile(r"[^.\[\]]+")


def _without_tags(location: Sequence[int | str]) -> tuple[int | str, ...]:
    """The path in the document: pydantic adds the chosen member of a union."""
    path: list[int | str] = []
    for part in location:
        member_of_list = bool(path) and isinstance(path[-1], int) and path[-2] == "objectives"
        if part in _UNION_TAGS and path and (path[-1] == "window" or member_of_list):
            continue
        path.append(part)
    return tuple(path)


def _dotted(path: Sequence[int | str]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _line_of(tree: Any, path: Sequence[int | str], offset: int) -> int:
    """1-based line of the deepest part of ``path`` that exists."""
    line = tree.lc.line + 1
    node = tree
    for part in path:
        try:
            position = node.lc.data[part]
            node = node[part]
        except (AttributeError, KeyError, IndexError, TypeError):
            break
        line = position[0] + 1
    return int(line) + offset


def _slices_fit(agreement: Agreement, tree: Any, offset: int, rollup_s: int) -> list[DocumentProblem]:
    problems = []
    for index, objective in enumerate(agreement.spec.objectives):
        if objective.budgeting.slice_s % rollup_s:
            path = ("spec", "objectives", index, "budgeting", "slice")
            problems.append(
                DocumentProblem(
                    _line_of(tree, path, offset),
                    _dotted(path),
                    f"the slice, {format_duration(objective.budgeting.slice_s)}, is not a multiple of the "
                    f"server's rollup interval, {rollup_s} s (database.rollup_s)",
                    f"Use a multiple of {rollup_s} s, or a server with a shorter rollup interval",
                    agreement.name,
                )
            )
    return problems


def _doubles(loaded: Sequence[Loaded]) -> Iterator[DocumentProblem]:
    first: dict[tuple[str, str], int] = {}
    for item in loaded:
        key = item.document.kind, item.document.name
        if key in first:
            yield double_named(*key, item.line, first[key])
        first.setdefault(key, item.line)


# -- What the model found wrong with a value, in words that say what to write instead. Pure.
#
# The model's checks speak of types and bounds. People who write agreements think in percent, milliseconds and
# names, so the usual mistakes (99.5 for 0.995, 0.95 for 95, "5ms" for 5, a name for a list of names) are met
# by the value that was meant.


_SEE: Final = "See docs/formats/agreement.md"
_SEE_DELIVERY: Final = "See docs/operations/recipients.md"
_DELIVERY: Final = (RecipientDocument, RouteDocument, SilenceDocument)
MOST_LISTED: Final = 30
"""Keys that are listed where one is not possible."""
_RATIOS: Final = ("target", "below", "credit", "credit_cap", "min_read_fraction")


def explain(item: Any, path: Sequence[int | str], model: type[Document] = Agreement) -> tuple[str, str]:
    """Problem and fix for one error of pydantic at ``path`` (without the tags of unions)."""
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    if kind == "agreement":
        return context["problem"], context["fix"]
    if kind == "missing":
        return "is required", f"Add the key {path[-1]}"
    if kind == "extra_forbidden":
        if value is None and str(path[-1]).isdigit():  # {up_to_iops: 3,000} is two keys to YAML
            return "a number with a comma is two values to YAML", "Write it without: 3000, not 3,000"
        return "there is no such key here", _other_key(path, model)
    if kind in ("literal_error", "enum", "union_tag_invalid"):
        expected = context.get("expected") or context.get("expected_tags")
        if tuple(path[-2:]) == ("indicator", "metric"):
            expected = ", ".join(METRICS)
        if tuple(path) == ("kind",):
            expected = ", ".join(KINDS)
        is_single = "," not in str(expected) and " or " not in str(expected)
        one_of = f"Write {str(expected).strip(chr(39))}" if is_single else f"Use one of {expected}"
        return f"{shown(value)} is not possible here", one_of
    if kind == "union_tag_not_found":
        return "the key 'type' is required", "Add type: calendar or type: rolling"
    if kind in ("too_short", "string_too_short"):
        return "is empty", "Name at least one" if kind == "too_short" else "Write a text"
    if kind in ("too_long", "string_too_long"):
        what = "entries" if kind == "too_long" else "characters"
        return f"has {len(value)} {what}, at most {context['max_length']} are possible", "Make it shorter"
    if kind == "list_type":
        fix = f"Write it in brackets: [{value}]" if isinstance(value, str) else _SEE
        return f"should be a list (the value is {shown(value)})", fix
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"should be a map of keys and values (the value is {shown(value)})", _SEE
    if kind.startswith("string_"):
        fix = "" if isinstance(value, str | dict | list) else f'Write it in quotes: "{shown(value)}"'
        return f"should be text (the value is {shown(value)})", fix
    problem = item["msg"].removeprefix("Input ")
    for words, said in _PLAIN_WORDS:
        problem = problem.replace(words, said)
    fix = _meant(value, str(path[-1]))
    if not fix and kind in ("float_type", "int_type"):
        fix = "Write digits alone, with a point before decimals"
    return f"{problem} (the value is {shown(value)})", fix


_PLAIN_WORDS: Final = (
    ("a valid number", "a number"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
)
"""Of pydantic, and as people say them."""


def _meant(value: Any, key: str) -> str:
    """What was probably meant by a number that is refused; "" if that cannot be said."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return ""
    if not isinstance(value, str):
        return _ratio_meant(float(value), key) if abs(value) < _MOST else ""
    is_share = key in (*_RATIOS, "percentile")
    found = number_and_unit(value, is_share=is_share)
    if found is None:
        return ""
    number, unit = found
    if key in _RATIOS and unit == "%":
        return f"Write {plain(number / 100)} for {plain(number)} %" if number < 100 else _BELOW_1
    if not unit and (fix := _ratio_meant(number, key)):
        return fix
    meant = scaled(number, unit, key)
    if meant is None:
        return ""
    if unit:
        return f"Write {plain(meant)}: the unit is part of the key's name"
    return f"Write {plain(meant)}" + (" without quotes" if plain(meant) == value else "")


def _ratio_meant(number: float, key: str) -> str:
    """Of a plain number that is out of bounds."""
    if key == "target" and number == 1:
        return "Write 0.999 for 99.9 %: a target of 1 leaves no error budget"
    if key in _RATIOS and 1 < number <= 100:
        return f"Write {plain(number / 100)} for {plain(number)} %" if number < 100 else _BELOW_1
    if key == "percentile" and 0 < number < 1:
        return f"Write {plain(number * 100)}: percentiles are in percent"
    return ""


_BELOW_1: Final = "Write a share below 1"
_MOST: Final = 1e300
"""A whole number of YAML can be too large for a float."""


def _other_key(path: Sequence[int | str], model: type[Document]) -> str:
    """What to write instead of a key that is not possible where it is."""
    key, known = str(path[-1]), _known_keys(model)
    here = [
        each for each in _keys_at(model, path[:-1]) if each != key
    ]  # of a union it may be another member's
    see = (_SEE_DELIVERY if model in _DELIVERY else _SEE).lower()
    listed = f"Possible here: {', '.join(sorted(here))}" if 0 < len(here) <= MOST_LISTED else ""
    if key in known:
        fix = f"{key} belongs elsewhere in the document: {see}"
    else:
        close = difflib.get_close_matches(key, here, n=1) or difflib.get_close_matches(key, known, n=1)
        fix = f"Did you mean {close[0]}?" if close else f"Remove it, or {see}"
    between = " " if fix.endswith("?") else ". "
    return f"{fix}{between}{listed}" if listed else fix


def _keys_at(model: type[Document], path: Sequence[int | str]) -> tuple[str, ...]:
    """Keys of the map that ``path`` leads to; of a union those of all its members."""
    schema = _schema_of(model)
    maps = [schema]
    for part in path:
        below = [
            each.get("items") if isinstance(part, int) else (each.get("properties") or {}).get(part)
            for each in maps
        ]
        maps = [each for node in below if node for each in _members(node, schema.get("$defs", {}))]
    return tuple(dict.fromkeys(key for each in maps for key in each.get("properties") or {}))


def _members(node: dict[str, Any], defs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a part of a JSON Schema may be: what it refers to, each member of a union, or itself."""
    if "$ref" in node:
        yield from _members(defs[node["$ref"].rpartition("/")[2]], defs)
    elif members := node.get("anyOf") or node.get("oneOf"):
        for each in members:
            yield from _members(each, defs)
    else:
        yield node


@cache
def _schema_of(model: type[Document]) -> dict[str, Any]:
    """Only read; to make it takes as long as to read a document."""
    return model.model_json_schema()


@cache
def _known_keys(model: type[Document]) -> tuple[str, ...]:
    schema = _schema_of(model)
    models = [schema, *schema.get("$defs", {}).values()]
    return tuple(sorted({key for model in models for key in model.get("properties", {})}))
