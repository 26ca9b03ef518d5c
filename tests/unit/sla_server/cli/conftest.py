"""The terminal of the command line's tests."""

from tests.support.cli import sla

__all__ = ["sla"]
