"""``python -m gateway_agent``: the same command as ``gateway-agent``."""

from __future__ import annotations

from gateway_agent.cli import cli

cli()
