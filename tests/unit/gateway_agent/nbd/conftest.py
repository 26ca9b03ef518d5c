"""Fixtures of several files here."""

from tests.support.nbd_several import openings

__all__ = ["openings"]
