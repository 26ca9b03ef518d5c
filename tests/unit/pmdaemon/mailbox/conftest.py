"""Both forms of a segment, and where it goes."""

from tests.support.mailbox_forms import form, path, pytest_generate_tests

__all__ = ["form", "path", "pytest_generate_tests"]
