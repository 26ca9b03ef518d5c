"""Essential parameters: what must be the same on all nodes, its digest, and how a node shows them (C14).

A running node carries them as tags of its engine, which any node can be asked for also while the cluster has
no majority. A node that starts compares its own with those of the nodes that answer, and does not join if one
differs; the error names the parameter and both values. The digest is for people and programs that want one
word: the same digest means the same parameters.

Values are compared without regard to case, because the engine writes its tags in small letters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Final

from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import EssentialsDiffer

FORMAT: Final = 1
"""Of streams, subjects and tags as this release makes them; a release that changes it cannot be mixed."""
PREFIX: Final = "essential."
SITE: Final = "site."
NODE: Final = "node."
DIGEST_CHARACTERS: Final = 16


def of(config: ClusterConfig) -> dict[str, str]:
    """The essential parameters of a node, as text."""
    return {
        "format": str(FORMAT),
        "max_payload_bytes": str(config.max_payload_bytes),
        "name": config.name.lower(),
        "replicas": str(config.replicas),
        "sync": config.sync,
        "tls": "on" if config.tls.enabled else "off",
    }


def digest(parameters: Mapping[str, str]) -> str:
    """One word for all of them: the beginning of the SHA-256 of their canonical JSON."""
    canonical = json.dumps(dict(parameters), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:DIGEST_CHARACTERS]


def node_tag(name: str) -> str:
    """By which the engine finds the node that a stream is to be kept on."""
    return f"{NODE}{name.lower()}"


def tags(config: ClusterConfig) -> list[str]:
    """What the engine of this node carries."""
    shown = [f"{PREFIX}{key}:{value}" for key, value in sorted(of(config).items())]
    return [f"{SITE}{config.site}", node_tag(config.node), *shown]


def of_tags(found: Iterable[str]) -> dict[str, str]:
    """Essential parameters from the tags of an engine; other tags are passed over."""
    pairs = (tag.removeprefix(PREFIX).partition(":") for tag in found if tag.startswith(PREFIX))
    return {key: value for key, _, value in pairs}


def site_of_tags(found: Iterable[str]) -> str:
    """The site of an engine; "" if it says none."""
    return next((tag.removeprefix(SITE) for tag in found if tag.startswith(SITE)), "")


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Parameter -> (here, there), for those that differ; "" where one side has none."""
    pairs = {key: (here.get(key, ""), there.get(key, "")) for key in here.keys() | there.keys()}
    return {key: pair for key, pair in pairs.items() if pair[0].lower() != pair[1].lower()}


def compare(here: Mapping[str, str], there: Mapping[str, str], other: str) -> None:
    """See that they are the same.

    ``other`` is the name of the other node, for the error.

    Raises:
        EssentialsDiffer: they are not.
    """
    if found := differences(here, there):
        raise EssentialsDiffer(other, found)
