"""A file of agreements too long for one call, cut between its documents. Pure.

One call carries ``CALL_BYTES`` of text and ``MAX_DOCUMENTS`` documents. A line that begins with ``---`` and a
blank or nothing more begins a document wherever it stands (YAML 1.2, 9.1.2: not even a block scalar may hold
one), so the text is cut there without being read. A text with directives (``%``) is left whole: they belong
to the document behind them.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from sla_server.agreements.limits import CALL_BYTES, MAX_DOCUMENTS

_BEGIN: Final = re.compile(rb"^---(?=[ \t\r\n]|\Z)", re.MULTILINE)
_DIRECTIVE: Final = re.compile(rb"^%", re.MULTILINE)


class DocumentChunk(NamedTuple):
    """What one call carries.

    Attributes:
        lines_before: lines of the file before it.
        documents: markers in it, at most one more than documents.
    """

    text: bytes
    lines_before: int
    documents: int


def cut(text: bytes) -> list[DocumentChunk]:
    """The whole text, in as few parts as the limits of a call allow; a single document is never cut."""
    starts = [0, *(found.start() for found in _BEGIN.finditer(text) if found.start())]
    if _DIRECTIVE.search(text) or (len(text) <= CALL_BYTES and len(starts) <= MAX_DOCUMENTS):
        return [DocumentChunk(text, 0, len(starts))]
    parts: list[DocumentChunk] = []
    begin = lines = count = 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        if count and (end - begin > CALL_BYTES or count == MAX_DOCUMENTS):
            parts.append(DocumentChunk(text[begin:start], lines, count))
            lines += text.count(b"\n", begin, start)
            begin, count = start, 0
        count += 1
    return [*parts, DocumentChunk(text[begin:], lines, count)]


def in_file(problem: dict[str, Any], part: DocumentChunk) -> dict[str, Any]:
    """A refusal of one part, its lines counted from the beginning of the file."""
    errors = [
        {**item, "line": item["line"] + part.lines_before} if item.get("line") else item
        for item in problem.get("errors") or []
    ]
    return {**problem, "errors": errors}
