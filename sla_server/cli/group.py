"""The group both commands are made of: our own errors, and files that cannot be used, become one line.

No client and no tables in here: ``sla-server`` starts the server and should stay small.
"""

from __future__ import annotations

from typing import Any, ClassVar

import click

from pmdaemon.runtime.excerpt import printable_lines
from pmdaemon.runtime.failures import outermost


class CommandGroup(click.Group):
    """Tells errors on stderr, with the program's name before them, and ends with their exit status."""

    program: ClassVar[str] = "sla"

    def invoke(self, ctx: click.Context) -> Any:
        """See ``click.Group``."""
        with outermost(self.program, self._tell):
            try:
                return super().invoke(ctx)
            except BrokenPipeError as exc:  # the reader of our output has seen enough
                ended = exc
        raise ended  # click knows what to do

    def _tell(self, text: str) -> None:
        click.echo(printable_lines(f"{self.program}: {text}"), err=True)
