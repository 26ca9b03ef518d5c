"""Containers by name, from files as Docker and Podman write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway_agent.containers import container_id
from gateway_agent.errors import GroupUnusable

DOCKER, PODMAN = "4f1d2c3b5a69" + "0" * 52, "99aa00bb11cc" + "1" * 52


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "docker/containers" / DOCKER
    folder.mkdir(parents=True)
    (folder / "config.v2.json").write_text(json.dumps({"ID": DOCKER, "Name": "/web", "Running": True}))
    storage = tmp_path / "containers/storage/overlay-containers"
    storage.mkdir(parents=True)
    entries = [{"id": PODMAN, "names": ["db", "db-alias"]}, {"id": "x"}, 3]
    (storage / "containers.json").write_text(json.dumps(entries))
    return tmp_path


@pytest.mark.parametrize(("name", "identity"), [("web", DOCKER), ("db", PODMAN), ("db-alias", PODMAN)])
def test_a_container_is_found_by_its_name(root: Path, name: str, identity: str) -> None:
    assert container_id(name, root) == identity


def test_a_name_that_no_container_has(root: Path) -> None:
    (root / "docker/containers" / DOCKER / "config.v2.json").write_text("half of")
    for name in ("web", "none", ""):
        with pytest.raises(GroupUnusable, match="no container of Docker or Podman has this name here"):
            container_id(name, root)
    with pytest.raises(GroupUnusable, match="no container"):
        container_id("web", root / "no-docker")


def test_a_name_that_two_have(root: Path) -> None:
    path = root / "containers/storage/overlay-containers/volatile-containers.json"
    path.write_text(json.dumps([{"id": PODMAN, "names": ["web"]}]))
    with pytest.raises(GroupUnusable, match="2 containers have this name: 4f1d2c3b5a69, 99aa00bb11cc"):
        container_id("web", root)
