"""Rows as the server's processes pass them on: of a table, of a query's result, of an answer of the API."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
"""Column to value: int, float, str, bool, bytes or None; columns of JSON are decoded."""
Rows = list[tuple[str, Row]]
"""(table, row): what dbmanager is asked to keep."""
