"""What differs between two configurations, and the part that one plane gets."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway_agent.config import AgentConfig
from gateway_agent.difference import compare, digest, in_force, plane_part
from gateway_agent.nbd.part import PlanePart
from pmdaemon.errors import ConfigError

QEMU = {"name": "vm-1", "socket": "/vm-1.qmp", "volume": [{"name": "a", "group": "g", "backend": "b"}]}


def config(tmp_path, planes=None, **more):
    """``planes``: {plane: {volume: more keys}}; files are not looked at."""
    planes = planes or {"nbd-0": {"vol-a": {}}}
    exports = [
        {"volume": volume, "backend": "disk", "plane": plane, "file": f"/{volume}", **keys}
        for plane, volumes in planes.items()
        for volume, keys in volumes.items()
    ]
    entries = [{"name": plane, "listen": [f"unix:/{plane}"]} for plane in planes]
    places = {"state_dir": tmp_path / "s", "runtime_dir": tmp_path / "r"}
    return AgentConfig.model_validate({"name": "gw-a", **places, "plane": entries, "export": exports, **more})


def lines(old, new):
    return compare(old, new).lines()


def test_the_same_configuration_differs_in_nothing(tmp_path):
    found = compare(config(tmp_path), config(tmp_path))
    assert not found
    assert found.lines() == []


def test_exports_are_added_removed_changed_and_moved(tmp_path):
    old = config(tmp_path, {"nbd-0": {"a": {}, "b": {}, "c": {}}, "nbd-1": {"d": {}}})
    new = config(tmp_path, {"nbd-0": {"a": {"read_only": True}, "e": {}}, "nbd-1": {"d": {}, "c": {}}})
    found = compare(old, new)
    assert (found.exports.added, found.exports.removed) == (("e",), ("b",))
    assert found.exports.changed == ("a", "c"), "a changed, and c moved"
    assert found.planes.changed == ("nbd-0", "nbd-1")
    assert (found.planes.added, found.planes.removed) == ((), ())
    assert found.lines() == ["exports added: e", "exports removed: b", "exports changed: a, c"]


def test_a_plane_that_may_be_left_out_is_the_same_when_it_is_named(tmp_path):
    old = config(tmp_path)
    new = config(tmp_path, export=[{"volume": "vol-a", "backend": "disk", "file": "/vol-a"}])
    assert not compare(old, new)


def test_planes_come_and_go_with_their_exports(tmp_path):
    one, two = config(tmp_path), config(tmp_path, {"nbd-0": {"vol-a": {}}, "nbd-1": {"vol-b": {}}})
    assert lines(one, two) == ["exports added: vol-b", "planes added: nbd-1"]
    assert lines(two, one) == ["exports removed: vol-b", "planes removed: nbd-1"]
    assert compare(one, two).planes.changed == (), "no plane that stays gets anything"


def test_a_listener_changes_its_plane_alone(tmp_path):
    old = config(tmp_path, {"nbd-0": {"a": {}}, "nbd-1": {"b": {}}})
    new = old.model_copy(deep=True)
    new.plane[1].listen = ["unix:/elsewhere"]
    found = compare(old, new)
    assert (found.planes.changed, found.lines()) == (("nbd-1",), ["planes changed: nbd-1"])


@pytest.mark.parametrize(
    ("more", "agent", "link", "planes"),
    [
        ({"name": "gw-b"}, ("name",), (), ()),
        ({"state_dir": "/elsewhere"}, ("state_dir",), (), ()),
        ({"server": "127.0.0.1:9"}, (), ("server",), ()),
        ({"spool_bytes": 8 << 20}, (), ("spool_bytes",), ()),
        ({"host": {"enabled": True}}, (), ("host",), ()),
        ({"qemu": [QEMU]}, (), ("qemu",), ()),
        ({"client_rule": "export-suffix"}, (), (), ("nbd-0",)),
    ],
)
def test_each_setting_has_a_process_that_takes_it(tmp_path, more, agent, link, planes):
    found = compare(config(tmp_path), config(tmp_path, **more))
    assert (found.agent, found.link, found.planes.changed) == (agent, link, planes)
    assert bool(found)


def test_every_key_of_the_agent_belongs_to_a_process(tmp_path):
    """A key that a release adds must not be lost: planes take what no other process takes."""
    old = config(tmp_path)
    for key in AgentConfig.model_fields:
        if key not in ("plane", "export", "group"):
            new = old.model_copy(update={key: Path("/other")})
            assert compare(old, new), key


def test_many_names_are_counted(tmp_path):
    old, new = config(tmp_path), config(tmp_path, {"nbd-0": {f"v{n}": {} for n in range(9)}})
    assert lines(old, new)[0] == "exports added: v0, v1, v2, v3, v4 and 4 more"


def test_what_needs_a_restart_stays_as_it_is(tmp_path):
    old, new = config(tmp_path), config(tmp_path, {"nbd-0": {"b": {}}}, name="gw-b", runtime_dir="/elsewhere")
    found = in_force(old, new)
    assert (found.name, found.runtime_dir) == ("gw-a", old.runtime_dir)
    assert [export.volume for export in found.export] == ["b"]
    assert in_force(old, config(tmp_path)) == old
    with pytest.raises(ValidationError, match="shorten runtime_dir"):
        in_force(
            config(tmp_path, runtime_dir="/" + "r" * 90),
            config(tmp_path, {"n" * 12: {"b": {}}}, runtime_dir="/r"),
        )


# -- the part of a plane


@pytest.fixture
def two(tmp_path):
    (tmp_path / "r").mkdir()
    return config(tmp_path, {"nbd-0": {"a": {"cap": {"ops_per_s": 5.0}}, "b": {}}, "nbd-1": {"c": {}}})


def write(part, raw):
    part.path.write_text(json.dumps(raw))


def test_a_part_says_what_the_file_says_of_one_plane(tmp_path, two):
    part = PlanePart(two, "nbd-0")
    raw = plane_part(two, "nbd-0")
    assert part.digest == digest(json.loads(json.dumps(raw)))
    assert part.digest != PlanePart(two, "nbd-1").digest
    write(part, raw)
    before = part.config
    assert part.read() == before
    assert [export.volume for export in before.exports] == ["a", "b"]
    elsewhere = two.model_copy(update={"server": "127.0.0.1:9"})
    assert digest(plane_part(elsewhere, "nbd-0")) == part.digest, "that is the link's"


def test_a_part_that_is_read_again_keeps_the_exports_that_it_knows(tmp_path, two):
    part = PlanePart(two, "nbd-0")
    a, _ = part.config.exports
    new = config(tmp_path, {"nbd-0": {"new": {}, "a": {"cap": {"ops_per_s": 5.0}}, "b": {"workers": 3}}})
    write(part, plane_part(new, "nbd-0"))
    found = part.read()
    assert [export.volume for export in found.exports] == ["new", "a", "b"]
    assert found.exports[1] is a
    assert found.exports[2].workers == 3
    assert part.digest == digest(plane_part(new, "nbd-0")) == PlanePart(new, "nbd-0").digest


def test_a_part_without_exports_ends_the_plane(tmp_path, two):
    part = PlanePart(two, "nbd-0")
    write(part, plane_part(config(tmp_path, {"nbd-1": {"c": {}}}), "nbd-0"))
    assert part.read().exports == []
    write(part, plane_part(two, "nbd-0"))
    assert len(part.read().exports) == 2, "and it may come back"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"export": 3}', '{"export": [{"volume": "x"}]}', '{"export": [1]}']
)
def test_a_part_that_no_parent_wrote_changes_nothing(two, text):
    part = PlanePart(two, "nbd-0")
    before = part.config, part.digest
    part.path.write_text(text)
    with pytest.raises(ConfigError):
        part.read()
    assert (part.config, part.digest) == before
    part.path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        part.read()


# -- groups of volumes


def group(*volumes, **more):
    return {"name": "night", "volumes": volumes, "cap": {"ops_per_s": 5.0}} | more


def test_a_group_is_a_part_of_the_plane_that_serves_its_volumes(tmp_path):
    planes = {"nbd-0": {"a": {}, "b": {}}, "nbd-1": {"c": {}}}
    (tmp_path / "r").mkdir()
    old, new = config(tmp_path, planes), config(tmp_path, planes, group=[group("a", "b", weights={"a": 3})])
    assert lines(old, new) == ["groups added: night"]
    assert compare(old, new).planes.changed == ("nbd-0",)
    assert lines(new, config(tmp_path, planes, group=[group("a", "b")])) == ["groups changed: night"]
    assert lines(new, old) == ["groups removed: night"]
    part = PlanePart(old, "nbd-0")
    write(part, plane_part(new, "nbd-0"))
    (found,) = part.read().groups
    assert found == new.groups_of("nbd-0")[0]
    assert found.shared.weights == {"a": 3.0, "b": 1.0}
    assert new.groups_of("nbd-1") == ()
    assert part.digest == PlanePart(new, "nbd-0").digest
    write(part, plane_part(config(tmp_path, {"nbd-1": {"c": {}}}), "nbd-0"))
    assert part.read().groups == ()


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ([group("a", "x")], "night: x is the volume of no .*export"),
        ([group("a", "c")], r"served by several planes: a \(nbd-0\), c \(nbd-1\)"),
        ([group("a"), group("b")], "two .*group.* tables have the name night"),
        ([group("a"), group("a", name="day")], "day: a is in group night already"),
        ([group("a", "a")], "named twice"),
        ([group("a", weights={"b": 2})], "weights names b"),
        ([group("a", weights={"a": 0})], r"weights.a\n.*greater than 0"),
        ([group("a", cap={"burst_s": 1})], "cap limits nothing"),
        ([group()], "volumes"),
    ],
)
def test_a_group_that_cannot_be_is_refused_with_its_name(tmp_path, groups, problem):
    with pytest.raises(ValidationError, match=problem):
        config(tmp_path, {"nbd-0": {"a": {}, "b": {}}, "nbd-1": {"c": {}}}, group=groups)
