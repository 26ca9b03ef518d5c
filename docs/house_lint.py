"""Holds the names and words of the house: ``python -m docs.house_lint``, part of ``make lint``.

The rules of code: no two public classes of one name in the product; no banned word in the name of a module,
class, function or parameter, and no vague verb before that of a function (docs/glossary.md has the words to
use); no banned phrase in docstrings, comments, documents and string literals, which are what people read in
messages, logs and events; no module of the product above 600 lines. The rules of documents: lines of at most
120 columns (``python -m docs.reflow``), no cell of a table longer than a line, design notes of at most 120
lines, and no file named that does not exist. Prints each place and exits 1 when there is one.
"""

from __future__ import annotations

import ast
import functools
import gc
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from docs.reflow import WIDTH, all_documents, blocks, documents

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("pmdaemon", "sla_server", "gateway_agent", "dashboard")
SOURCES: Final = (*PRODUCT, "benchmarks", "deploy", "docs", "sql", "tests")
RECORDS: Final = (("docs", "adr"), ("docs", "spec"))
"""Decisions as they were taken, and a specification as it was given: their words stay."""

NAMES: Final = {
    "brain": "controller",
    "looker": "sql_worker",
    "courier": "publisher",
    "luggage": "session state",
    "vigil": "timeouts",
    "clerk": "certificate worker",
    "doorway": "listener",
    "strangers": "unregistered",
    "teller": "reporter",
    "rota": "due queue",
    "surroundings": "inventory",
    "handover": "inbox or migration",
}
"""Banned within identifiers, and what to say instead."""

VERBS: Final = {
    "breathe": "yield_to_main_loop",
    "bury": "reap",
    "enter": "add",
    "give_way": "yield_to",
    "greet": "announce",
    "look": "poll, check, find",
    "note": "record, add",
    "obey": "apply",
    "settle": "wait, flush, finish",
    "stand": "state, status",
    "take_up": "recover_state",
    "tell": "report, send, notify",
    "welcome": "accept, add",
}
"""Verbs that a function's name must not begin with, as each had several meanings, and what to say instead."""

WIDE_CELLS: Final = {
    "docs/formats/sql.md": "a column and its meaning",
    "docs/operations/agent.md": "a key, a log line, and what to do",
    "docs/operations/cli.md": "a command and what it does",
    "docs/operations/runbook.md": "a symptom, where to look, what to do",
}
"""Documents with cells longer than a line, of before the rule, and what their rows are."""

MODULE_LINES: Final = 600
"""Of a module of the product: one concept, one file (HOUSE.md 1)."""
NOTE_LINES: Final = 120
"""Of a design note."""
FILES_OF_USERS: Final = {
    "agent.toml",
    "config.toml",
    "relay.toml",
    "runtime_dir/running.toml",
    "sql/versions/NNNN_what.py",
}
"""Files that documents name and that are not of this repository."""

PHRASES: Final = {
    r"\banew\b": "again",
    r"\bof late\b": "recently",
    r"\banother than\b": "different from",
    r"\bis over\b": "has ended",
    r"\bshall\b": "should",
    r"\bcost/s": "weighted IOPS",
    r"\btold\b(?! (?:apart|from))": "sent, reported, notified",
    r"\b(?:stands|stand) (?:in|on|under|for|beside|behind|within)\b": "is in, is stored in",
}
"""Banned in prose, and what to say instead."""

LITERAL_PHRASES: Final = PHRASES | {
    r"\b(?:nobody|somebody|whoever)\b": "no process, another program, the part that"
}
"""Banned in string literals."""

ALLOWED_LITERALS: Final = {
    "not-told": "a reason of slices: stored by every release, and shown by the page",
    "its time is over": "services/control: stored in throttles of every release, and a test has it",
    "Nobody is throttled": "of the page and `sla top`, where it is people who read their volumes' names",
    "nobody to slow down": "services/control: stored in decisions, and searched for by operators",
}
"""Pieces of literals that may stay, and why."""


@functools.cache
def modules() -> list[tuple[Path, ast.Module, str]]:
    """Path, tree and text of each module of the product."""
    paths = [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]
    texts = [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths]
    return [(path, ast.parse(text), text) for path, text in texts]


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a module: six rules look at them."""
    return list(ast.walk(tree))


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each definition, parameter and variable."""
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def prose(tree: ast.Module, text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment and docstring line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in nodes(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string literal that is no docstring, without what is allowed."""
    docstrings = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, _without_allowed(node.value)


def _without_allowed(text: str) -> str:
    for piece in ALLOWED_LITERALS:
        text = text.replace(piece, "")
    return text


def twice() -> Iterator[str]:
    """Public classes that share a name."""
    places: dict[str, list[Path]] = defaultdict(list)
    for path, tree, _ in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    for name, paths in sorted(places.items()):
        if len(paths) > 1:
            yield f"{name}: two public classes of one name, in {' and '.join(map(str, paths))}"


def banned_names() -> Iterator[str]:
    """Identifiers with a banned word in them."""
    for path, tree, _ in modules():
        for line, name in sorted(set(identifiers(tree)) | {(1, path.stem)}):
            words = re.findall(r"[A-Z]?[a-z]+", name)
            for word in {word.lower() for word in words} & NAMES.keys():
                yield f"{path}:{line}: {name}: say {NAMES[word]}, not {word}"


def vague_verbs() -> Iterator[str]:
    """Functions whose names begin with a vague verb."""
    for path, tree, _ in modules():
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (verb := vague_verb(node.name)):
                yield f"{path}:{node.lineno}: {node.name}: say {VERBS[verb]}, not {verb}"


def vague_verb(name: str) -> str | None:
    """The vague verb that a function's name begins with; those of Python's own protocols are free."""
    if name.startswith("__"):
        return None
    plain = f"{name.strip('_')}_"
    return next((verb for verb in VERBS if plain.startswith(f"{verb}_")), None)


def banned_phrases() -> Iterator[str]:
    """Prose and literals with a banned phrase in them."""
    lines: list[tuple[Path, int, str]] = []
    spoken: list[tuple[Path, int, str]] = []
    for path, tree, source in modules():
        lines += [(path, line, text) for line, text in prose(tree, source)]
        spoken += [(path, line, text) for line, text in literals(tree)]
    for place in all_documents():
        if place.parts[:2] not in RECORDS:
            text = (ROOT / place).read_text(encoding="utf-8")
            lines += [
                (place, number, _without_allowed(line)) for number, line in enumerate(text.splitlines(), 1)
            ]
    for phrases, found_in in ((PHRASES, lines), (LITERAL_PHRASES, spoken)):
        for place, number, text in found_in:
            for pattern, instead in phrases.items():
                if found := re.search(pattern, text, re.IGNORECASE):
                    yield f"{place}:{number}: say {instead}, not {found.group().lower()}"


def long_lines() -> Iterator[str]:
    """Lines and cells of documents beyond the width, and design notes beyond their length."""
    for place in documents():
        name, lines = place.as_posix(), (ROOT / place).read_text(encoding="utf-8").splitlines()
        for number, problem in too_long(lines, are_cells_wide=name in WIDE_CELLS):
            yield f"{place}:{number}: {problem}"
        if place.parts[:2] == ("docs", "design") and len(lines) > NOTE_LINES:
            yield f"{place}: {len(lines)} lines, a design note has at most {NOTE_LINES}: divide it"


def too_long(lines: list[str], *, are_cells_wide: bool) -> Iterator[tuple[int, str]]:
    """Number and problem of each line of a document that is too long; code is free."""
    number = 0
    for block in blocks(lines):
        for line in block.lines:
            number += 1
            cells = re.split(r"(?<!\\)\|", line)
            if block.is_prose and len(line) > WIDTH:
                yield number, f"{len(line)} columns: python -m docs.reflow divides it"
            elif line.startswith("|") and not are_cells_wide and max(map(len, cells)) > WIDTH:
                yield number, "a cell longer than a line: make a list of this table, or say it below"


def long_modules() -> Iterator[str]:
    """Modules of the product that hold more than one concept, as their length says."""
    for path, _, text in modules():
        if (count := len(text.splitlines())) > MODULE_LINES:
            yield f"{path}: {count} lines, a module has at most {MODULE_LINES}: divide it"


def missing_files() -> Iterator[str]:
    """Files and links that documents name and that do not exist."""
    names = {path.relative_to(ROOT).as_posix() for path in _files()}
    ends = {
        "/".join(parts[start:])
        for parts in (name.split("/") for name in names)
        for start in range(len(parts))
    }
    for place in documents():
        for number, line in enumerate((ROOT / place).read_text(encoding="utf-8").splitlines(), 1):
            for named in re.findall(r"`([\w./-]+\.(?:py|c|js|sql|toml|sh|md))`", line):
                if named not in ends and named not in FILES_OF_USERS and not named.startswith("/"):
                    yield f"{place}:{number}: {named} does not exist"
            for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", line):
                if not (ROOT / place.parent / link).exists():
                    yield f"{place}:{number}: the link {link} leads nowhere"


def _files() -> Iterator[Path]:
    for path in ROOT.iterdir():
        if path.name in SOURCES or path.is_file():
            yield from (found for found in [path, *path.rglob("*")] if found.is_file())


def unused_allowances() -> Iterator[str]:
    """Allowed pieces that no literal has any more."""
    texts = [
        node.value
        for _, tree, _ in modules()
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for piece in ALLOWED_LITERALS:
        if not any(piece in text for text in texts):
            yield f"docs/house_lint.py: no literal has {piece!r} any more: remove it from ALLOWED_LITERALS"


def main() -> int:
    """Print what breaks a rule; the number of rules' breaches decides the exit status."""
    gc.disable()  # all trees are kept to the end: to walk them for garbage was a third of the work
    code = [
        *twice(),
        *banned_names(),
        *vague_verbs(),
        *banned_phrases(),
        *unused_allowances(),
        *long_modules(),
    ]
    found = [*code, *long_lines(), *missing_files()]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
