"""Label selectors on a command line: checked here, in the server's words, and applied by the server."""

from __future__ import annotations

from sla_server.agreements.selectors import LabelSelector, parse_labels
from sla_server.cli.errors import BadUsage


def check_labels(text: str, option: str = "-l") -> LabelSelector:
    """What a label selector asks for.

    Raises:
        BadUsage: it is none.
    """
    try:
        return parse_labels(text)
    except ValueError as exc:
        raise BadUsage(f"{option}: {exc}") from exc


def label_values(text: str, option: str = "-l") -> dict[str, str]:
    """Labels by value, as documents name them.

    Raises:
        BadUsage: it is no selector, or one that a document cannot hold.
    """
    found = {}
    for one in check_labels(text, option):
        if one.is_negated or one.values is None or len(one.values) != 1:
            raise BadUsage(
                f"{option}: a document names labels by value; write KEY=VALUE, several with commas between"
            )
        found[one.key] = one.values[0]
    return found
