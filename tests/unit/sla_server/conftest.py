"""A test of the API builds the whole web application: some 120 addresses, compiled by werkzeug each time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from werkzeug.routing.rules import Rule


@pytest.fixture(scope="session", autouse=True)
def _addresses_are_compiled_once() -> Iterator[None]:
    """A function that builds the address of a rule depends on its text only: another application takes it."""
    compiled: dict[tuple[str, bool], Callable[..., tuple[str, str]]] = {}
    compile_builder = Rule._compile_builder

    @functools.wraps(compile_builder)
    def kept(self: Rule, append_unknown: bool = True) -> Any:
        if self.defaults or self.subdomain or self.host:
            return compile_builder(self, append_unknown)
        key = (self.rule, append_unknown)
        if key not in compiled:
            compiled[key] = compile_builder(self, append_unknown)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "_compile_builder", kept)
        yield
