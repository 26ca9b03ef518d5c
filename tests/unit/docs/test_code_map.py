"""The code map names every package and every thread of the product."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from docs.house_lint import PRODUCT, ROOT

MAP = (ROOT / "docs" / "code-map.md").read_text(encoding="utf-8")


def _thread_names() -> Iterator[str]:
    """Names given to ``ThreadGroup.start``; of one with a value in it the part before the first."""
    texts = (path.read_text(encoding="utf-8") for name in PRODUCT for path in (ROOT / name).rglob("*.py"))
    for text in texts:
        if ".start(" not in text:  # to parse them all takes a hundred times as long as to read them
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "start"
            ):
                if not node.args:
                    continue
                name = node.args[0].value if isinstance(node.args[0], ast.Subscript) else node.args[0]
                first = name.values[0] if isinstance(name, ast.JoinedStr) else name
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


def test_every_thread_is_in_the_map() -> None:
    names = set(_thread_names())
    assert {"db-writer", "pm-in-", "ev-", "watchdog"} <= names
    assert sorted(name for name in names if f"`{name}" not in MAP) == []


def test_every_package_is_in_the_map() -> None:
    tops = {path.parent.relative_to(ROOT) for name in PRODUCT for path in (ROOT / name).glob("*/__init__.py")}
    names = {place.as_posix() for place in tops} | set(PRODUCT) - {"pmdaemon"}
    missing = {name for name in names if f"`{name}`" not in MAP and f"`{name.partition('/')[2]}/" not in MAP}
    assert missing == set()
