"""The group both commands are made of: our own errors, and files that cannot be used, become one line.

No client and no tables in here: ``sla-server`` starts the server and should stay small.
"""

from __future__ import annotations

from typing import Any, ClassVar

import click

from pmdaemon.errors import SlaError
from pmdaemon.excerpt import printable_lines
from sla_server.cli.errors import FileTrouble


class Group(click.Group):
    """Tells errors on stderr, with the program's name before them, and ends with their exit status."""

    program: ClassVar[str] = "sla"

    def invoke(self, ctx: click.Context) -> Any:
        """See ``click.Group``."""
        try:
            return super().invoke(ctx)
        except SlaError as exc:
            self._tell(exc)
        except OSError as exc:
            if exc.filename is None:  # no file's fault: a bug, or a closed pipe, which click knows
                raise
            self._tell(FileTrouble(exc))
        except KeyboardInterrupt:
            raise SystemExit(130) from None  # 128 + SIGINT, as shells say it

    def _tell(self, error: SlaError) -> None:
        click.echo(printable_lines(f"{self.program}: {error}"), err=True)
        raise SystemExit(error.exit_status) from error
