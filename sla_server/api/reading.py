"""What the dashboard may ask of the API in process; everything else it gets through REST like any client."""

from __future__ import annotations

from importlib.metadata import version

from sla_server.api.app import create_app
from sla_server.api.context import AppContext

__all__ = ["AppContext", "create_app", "product_version"]


def product_version() -> str:
    """Version of this product."""
    return version("storage-sla-server")
