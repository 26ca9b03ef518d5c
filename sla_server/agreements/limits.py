"""What one call of ``apply`` carries; apart from the reader, so that who only compares needs no YAML."""

from __future__ import annotations

from typing import Final

CALL_BYTES: Final = 60_000  # it travels to services in one frame header of at most 65,535 bytes
MAX_DOCUMENTS: Final = 200
