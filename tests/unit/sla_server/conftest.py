"""A test of the API builds the whole web application: some 130 addresses, compiled by werkzeug each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from werkzeug.routing.rules import Rule


@pytest.fixture(scope="session", autouse=True)
def _addresses_are_compiled_once() -> Iterator[None]:
    """What a rule is compiled to depends on its text only: another application takes it from the first."""
    compiled: dict[tuple[str, bool | None], Rule] = {}
    compile_rule = Rule.compile

    def kept(self: Rule) -> None:
        key = (self.rule, self.merge_slashes)
        if self.defaults or self.subdomain or self.host:
            compile_rule(self)
        elif (first := compiled.get(key)) is None:
            compile_rule(self)
            compiled[key] = self
        else:
            self._parts, self._trace, self._converters = first._parts, first._trace, first._converters
            self.arguments = set(first.arguments)
            self._build = first._build.__func__.__get__(self, None)  # type: ignore[attr-defined]
            self._build_unknown = first._build_unknown.__func__.__get__(self, None)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "compile", kept)
        yield
