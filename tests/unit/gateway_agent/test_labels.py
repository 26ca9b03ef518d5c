"""Labels of volumes in the agent's file, and in what it registers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway_agent.config import AgentConfig
from gateway_agent.link.exports import exports_of
from pmdaemon.errors import MalformedFrame
from pmdaemon.wire.labels import MAX_LABELS
from pmdaemon.wire.messages.agent import Registration
from pmdaemon.wire.messages.stored import StoredGateway

PLANE = {"name": "nbd-0", "listen": "tcp:127.0.0.1:10809"}
EXPORT = {"volume": "vol-1", "backend": "b", "size_bytes": 1, "read_only": False, "source": "nbd"}


def config(**export: Any) -> AgentConfig:
    volume = {"volume": "vol-1", "backend": "b", "file": "/dev/zero", **export}
    return AgentConfig.model_validate({"name": "host-1", "plane": [PLANE], "export": [volume]})


def test_volumes_of_all_sources_have_labels_by_the_names_the_server_knows():
    more = {
        "cgroup": [
            {"name": "db", "group": "db.service", "device": "sda", "backend": "b", "labels": {"x": "1"}}
        ],
        "qemu": [
            {
                "name": "vm",
                "socket": "/run/vm",
                "volume": [{"name": "root", "backend": "b", "drive": "d", "labels": {"x": "2"}}],
            }
        ],
    }
    entry = {"volume": "vol-1", "backend": "b", "file": "/dev/zero"}
    exports = [{**entry, "labels": {"tier": "gold"}}, {**entry, "volume": "vol-2"}]
    found = AgentConfig.model_validate({"name": "host-1", "plane": [PLANE], "export": exports, **more})
    assert found.labels() == {
        "vol-1": {"tier": "gold"},
        "cgroup:host-1:db": {"x": "1"},
        "qemu:host-1:root": {"x": "2"},
    }


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"a b": "x"}, "the key 'a b': a key is 1-63 of letters"),
        ({"tier": "a,b"}, "the value 'a,b' of tier: a value is 1-63"),
        ({f"k{n}": "v" for n in range(MAX_LABELS + 1)}, "17 labels, the limit of a volume is 16"),
    ],
)
def test_labels_that_no_selector_could_name_are_refused(labels: dict[str, str], said: str):
    with pytest.raises(ValidationError, match=said):
        config(labels=labels)
    with pytest.raises(MalformedFrame, match=said):
        Registration.parse({"exports": [{**EXPORT, "labels": labels}], "spool": []})


def test_labels_count_for_the_length_of_what_is_registered():
    entry = {"backend": "b", "file": "/dev/zero", "labels": {f"k{n}": "v" * 60 for n in range(4)}}
    exports = [{**entry, "volume": f"vol-{n}"} for n in range(300)]
    with pytest.raises(ValidationError, match="the names and labels of the exports take"):
        AgentConfig.model_validate({"name": "host-1", "plane": [PLANE], "export": exports})


class Source:
    def __init__(self, *exports: dict[str, Any]) -> None:
        self._exports = list(exports)

    def exports(self) -> list[dict[str, Any]]:
        return self._exports


def test_what_is_registered_has_the_labels_and_agents_of_before_have_none():
    sources: Any = [Source(EXPORT, {**EXPORT, "volume": "vol-2"})]
    exports = exports_of(sources, {"vol-1": {"tier": "gold"}, "vol-2": {}, "gone": {"x": "y"}})
    assert exports == [{**EXPORT, "labels": {"tier": "gold"}}, {**EXPORT, "volume": "vol-2"}]
    assert Registration.parse({"exports": exports, "spool": []}).exports == exports
    stored = StoredGateway.read(
        {"gw": "g", "exports": [*exports, {**EXPORT, "labels": {"a b": 1, "c": "d"}}]}
    )
    assert stored.exports is not None
    assert [each.labels for each in stored.exports] == [(("tier", "gold"),), (), (("c", "d"),)]


def test_no_map_of_labels_is_refused():
    with pytest.raises(MalformedFrame, match=r"key 'labels' is .*, expected a map"):
        Registration.parse({"exports": [{**EXPORT, "labels": ["tier"]}], "spool": []})
