"""Groups of commands, whose lists say of each what it does."""

from __future__ import annotations

import click


class Commands(click.Group):
    """Lists its commands with all of their first sentence; click's own cuts it where a line is full."""

    group_class = type  # groups in it are of its class

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See ``click.Group``."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(limit=1000)) for name, one in found if one and not one.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
