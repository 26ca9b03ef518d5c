"""Divides long lines of the documents: ``python -m docs.reflow``, part of ``make fmt``.

A paragraph or list item with a line beyond ``WIDTH`` columns is filled again from that line on; what is short
enough stays as it was written, so that a change shows what was changed. Headings, tables, code and lines that
end with a break of their own are left alone; ``docs.house_lint`` names those that are too long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
WIDTH: Final = 120
GENERATED: Final = ("docs/operations/configuration.md", "docs/formats/events.md", "docs/formats/messages.md")
"""Their tables are as wide as what the code says; beside them docs/measurements."""

_ITEM: Final = re.compile(r" *(?:[-*+]|\d+[.)]) +")
_OTHER: Final = re.compile(r" *(?:[|>#<]|```|~~~|\[[^\]]+\]: )")
_STARTER: Final = re.compile(r"(?:[-*+#>|=]+|\d+[.)])$")
"""A word that must not begin a line: Markdown would take it for a mark."""


def documents() -> list[Path]:
    """The documents that people write, relative to the root. The changelog is filled by hand."""
    return [place for place in all_documents() if not is_generated(place)]


def all_documents() -> list[Path]:
    """Those that ``make docs`` writes, too."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT) for path in paths]


def is_generated(path: Path) -> bool:
    """Whether ``make docs`` writes this document."""
    return path.as_posix() in GENERATED or path.parts[:2] == ("docs", "measurements")


def reflow(text: str) -> str:
    """The document with its long lines divided."""
    return "".join(f"{line}\n" for block in blocks(text.splitlines()) for line in block.filled())


class Block(NamedTuple):
    """Some lines, and whether they may be divided elsewhere."""

    lines: list[str]
    is_prose: bool = False

    def filled(self) -> list[str]:
        """The lines, filled again from the first one that is too long."""
        long = next((number for number, line in enumerate(self.lines) if len(line) > WIDTH), None)
        if long is None or not self.is_prose or any(line.endswith(("  ", "\\")) for line in self.lines):
            return self.lines
        mark = _ITEM.match(self.lines[0])
        lead = mark.group() if mark else _indent(self.lines[long])
        is_begin = mark is not None and long == 0
        text = " ".join(line.strip() for line in self.lines[long:])
        words = _words(text.removeprefix(lead.strip()) if is_begin else text)
        indent = " " * len(lead)
        lines = [(lead if is_begin else indent) + words[0]]
        for word in words[1:]:
            if len(lines[-1]) + 1 + len(word) <= WIDTH:
                lines[-1] += f" {word}"
            else:
                lines.append(indent + word)
        return self.lines[:long] + lines


def blocks(lines: Sequence[str]) -> Iterator[Block]:
    """Paragraphs and list items, each whole; every other line by itself."""
    prose: list[str] = []
    in_fence = False
    for line in lines:
        is_fence = line.lstrip().startswith(("```", "~~~"))
        in_fence ^= is_fence
        is_item = _ITEM.match(line) is not None
        is_code = in_fence or is_fence or (not prose and not is_item and line.startswith("    "))
        is_other = is_code or not line.strip() or _OTHER.match(line) is not None
        if prose and (is_other or is_item):
            yield Block(prose, is_prose=True)
            prose = []
        if is_other:
            yield Block([line])
        else:
            prose.append(line)
    if prose:
        yield Block(prose, is_prose=True)


def _indent(line: str) -> str:
    return " " * (len(line) - len(line.lstrip()))


def _words(text: str) -> list[str]:
    """Words, with short code spans whole, and none that Markdown would take for a mark at a line's begin."""
    words: list[str] = []
    for piece in re.findall(r"(?:`[^`]+`|\S)+", text):
        if words and _STARTER.match(piece):
            words[-1] += f" {piece}"
        else:
            words += [piece] if len(piece) <= WIDTH // 2 else piece.split(" ")
    return words


def main() -> None:
    """Write the documents that change."""
    for place in documents():
        text = (ROOT / place).read_text(encoding="utf-8")
        if (new := reflow(text)) != text:
            (ROOT / place).write_text(new, encoding="utf-8")
            print(f"{place}: filled")


if __name__ == "__main__":
    main()
