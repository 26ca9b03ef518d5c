"""The terminal of the command line's tests, and the directory that simulations read."""

from tests.support.cli import sla
from tests.support.simulate import slas

__all__ = ["sla", "slas"]
