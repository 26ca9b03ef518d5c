"""Identities of containers by their names, from the files that Docker and Podman keep of them.

    /var/lib/docker/containers/ID/config.v2.json                       {"ID": ..., "Name": "/web"}
    /var/lib/containers/storage/overlay-containers/containers.json     [{"id": ..., "names": ["web"]}]

No daemon is asked: the link must not wait for one. Containers of Kubernetes, and of users' own Podman, are
not in these files; they are named by their ID.

Nothing here has state. Thread: any; each call reads small files, one for each container of Docker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gateway_agent.errors import GroupUnusable

CONTAINERS: Final = Path("/var/lib")
MOST_CONTAINERS: Final = 2_000  # of Docker, looked at for one name
_OF_PODMAN: Final = ("containers.json", "volatile-containers.json")


def container_id(name: str, root: Path = CONTAINERS) -> str:
    """The ID of the one container with this name.

    Args:
        name: as ``docker ps`` and ``podman ps`` show it.
        root: the folder of the folders ``docker`` and ``containers``.

    Raises:
        GroupUnusable: there is none, or Docker and Podman have one each.
    """
    found = sorted({identity for identity, names in _known(root) if name in names})
    if not found:
        raise GroupUnusable(
            f"container:{name}",
            "no container of Docker or Podman has this name here; an ID instead of a name needs 12 digits at "
            "least",
            is_absent=True,
        )
    if len(found) > 1:
        ids = ", ".join(identity[:12] for identity in found)
        raise GroupUnusable(
            f"container:{name}", f"{len(found)} containers have this name: {ids}; write the ID of one"
        )
    return found[0]


def _known(root: Path) -> Iterator[tuple[str, list[str]]]:
    """(id, names) of each container that the files tell of."""
    for number, path in enumerate((root / "docker/containers").glob("*/config.v2.json")):
        if number == MOST_CONTAINERS:
            break
        said = _read(path)
        if isinstance(said, dict) and isinstance(said.get("ID"), str):
            yield said["ID"], [str(said.get("Name", "")).removeprefix("/")]
    for storage in (root / "containers/storage").glob("*-containers"):
        for each in _OF_PODMAN:
            entries = _read(storage / each)
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                    yield entry["id"], [str(name) for name in entry.get("names") or ()]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):  # it has ended, or is being written
        return None
