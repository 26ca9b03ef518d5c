"""What a node has stored alone is not given to an engine that would remove it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import StoredAlone
from sla_server.cluster.node import ALONE, STORE, check_store

PEERS = [{"name": "n2", "listen": "127.0.0.1:1", "routes": "127.0.0.1:2"}]
ONE = ClusterConfig(node="n1")
SEVERAL = ClusterConfig.model_validate({"node": "n1", "peers": PEERS})


def _made(directory: Path, *parts: str) -> None:
    directory.joinpath(STORE, "jetstream", *parts).mkdir(parents=True, exist_ok=True)


def test_a_node_that_has_stored_alone_does_not_become_one_of_several_with_it(tmp_path: Path) -> None:
    check_store(SEVERAL, tmp_path)  # new
    check_store(ONE, tmp_path)
    check_store(SEVERAL, tmp_path)  # it has stored nothing
    assert not (tmp_path / STORE / ALONE).exists()
    check_store(ONE, tmp_path)
    _made(tmp_path, "SLA", "streams", "SLA_orders")
    for _ in range(2):
        with pytest.raises(StoredAlone, match=f"SLA_orders.*move {tmp_path / STORE} away") as caught:
            check_store(SEVERAL, tmp_path)
        assert (caught.value.streams, caught.value.exit_status) == (("SLA_orders",), 78)
    check_store(ONE, tmp_path)
    (tmp_path / STORE).rename(tmp_path / "aside")
    check_store(SEVERAL, tmp_path)


def test_a_store_of_a_former_release_is_known_by_what_the_engine_has_written(tmp_path: Path) -> None:
    _made(tmp_path, "SLA", "streams", "KV_SLA_LEASES")
    with pytest.raises(StoredAlone):
        check_store(SEVERAL, tmp_path)
    _made(tmp_path, "SYS", "_js_", "_meta_")
    check_store(SEVERAL, tmp_path)


def test_what_was_stored_alone_meanwhile_is_not_lost_either(tmp_path: Path) -> None:
    """The peers were taken out, as after the loss of two machines, and are back."""
    _made(tmp_path, "SLA", "streams", "SLA_orders")
    _made(tmp_path, "SYS", "_js_", "_meta_")
    check_store(SEVERAL, tmp_path)
    check_store(ONE, tmp_path)
    with pytest.raises(StoredAlone):
        check_store(SEVERAL, tmp_path)
