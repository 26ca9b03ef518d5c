"""Addresses of a server are looked at before it starts, also those that it needs only once it acts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pmdaemon.errors import ConfigError
from sla_server import config as configuration
from sla_server.cli.server import check_addresses


def test_a_taken_address_for_forwarded_agents_is_named_before_a_takeover_needs_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {"listen": "127.0.0.1:0", "forwarded": f"127.0.0.1:{taken.getsockname()[1]}"}
        server = configuration.ServerConfig.model_validate(
            {"runtime_dir": tmp_path, "api": {"listen": "127.0.0.1:0"}, "pmdaemon": settings}
        )
        with pytest.raises(ConfigError, match=r"pmdaemon\.forwarded"):
            check_addresses(configuration.resolve(server))
    check_addresses(configuration.resolve(server))
