"""The agent's parent: when it reads its file again, what it refuses, what it hands to its children."""

import json
import os
import re
import signal
import ssl

import pytest
from click.testing import CliRunner

from gateway_agent import agent
from gateway_agent.agent import Agent, planes_behind
from gateway_agent.cli import cli
from gateway_agent.config import load_agent
from gateway_agent.errors import BackingFileError
from gateway_agent.link import state_files
from gateway_agent.nbd.tls import load_own
from gateway_agent.reload import ConfigFile, ReloadRecord, prepare
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.hangup import Hangup
from pmdaemon.runtime.stop import Stop
from tests.support.agent_files import Folder, refused


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path)
    made.write({"nbd-0": ["a"]})
    return made


# -- the file


def test_a_file_is_read_when_it_has_been_the_same_for_a_second(folder):
    file = ConfigFile(folder.file)
    assert not file.has_changed()
    folder.write({"nbd-0": ["a", "b"]})
    assert not file.has_changed(), "an editor may still write it"
    folder.write({"nbd-0": ["a", "b", "c"]})
    assert not file.has_changed()
    assert file.has_changed()
    file.read()
    assert not file.has_changed()


def test_a_file_that_is_touched_moved_away_or_put_back_is_the_same(folder):
    file, aside = ConfigFile(folder.file), folder.path / "aside"
    os.utime(folder.file, ns=(1, 1))
    assert [file.has_changed() for _ in range(3)] == [False] * 3
    folder.file.rename(aside)
    assert [file.has_changed() for _ in range(3)] == [False] * 3
    with pytest.raises(ConfigError, match="cannot be read"):
        file.read()
    aside.rename(folder.file)
    assert [file.has_changed() for _ in range(3)] == [False] * 3


def test_what_was_refused_is_not_tried_again_by_itself(folder):
    file = ConfigFile(folder.file)
    folder.file.write_text("half of an ed")
    assert [file.has_changed() for _ in range(2)] == [False, True]
    file.read()
    assert [file.has_changed() for _ in range(3)] == [False] * 3


# -- what is refused


def test_a_file_is_checked_whole_before_anything_changes(folder):
    current = folder.config()
    folder.write({"nbd-0": ["a"]}, more="[[export]]\nvolume = 3\n")
    refused(folder, current, r"agent\.toml: export.*volume")
    folder.write({"nbd-0": ["a", "b"]})
    (folder.path / "b.img").unlink()
    refused(folder, current, r"volume b: file .*b\.img cannot be used", BackingFileError)


def test_a_file_that_has_become_a_pipe_is_not_read(folder):
    file = ConfigFile(folder.file)
    folder.file.unlink()
    os.mkfifo(folder.file)
    assert [file.has_changed() for _ in range(3)] == [False] * 3
    with pytest.raises(ConfigError, match="is not a regular file"):
        file.read()
    with pytest.raises(ConfigError, match="it is a pipe, not a file"):
        load_own(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "tls_certificate", str(folder.file), "")


def test_a_file_of_an_export_that_stays_is_not_looked_at(folder):
    """It may be away for a moment, and others must not wait for it."""
    current = folder.config()
    folder.write({"nbd-0": ["a", "b"]})
    (folder.path / "a.img").unlink()
    plan = prepare(ConfigFile(folder.file), current)
    assert plan.difference.exports.added == ("b",)
    assert not (folder.path / "nbd-0").exists()


def test_a_pipe_as_a_backing_file_is_refused_and_not_waited_for(folder):
    current = folder.config()
    folder.write({"nbd-0": ["a", "b"]}, more="read_only = true\n")
    (folder.path / "b.img").unlink()
    os.mkfifo(folder.path / "b.img")
    refused(folder, current, "neither a regular file nor a block device", BackingFileError)


# -- the agent


class FakeChild:
    """What the agent uses of a child; ``sent`` are its signals."""

    def __init__(self, name, command):
        self.name, self.command, self.sent = name, command, []
        self.pid, self.restarts, self.status, self.hung, self.kind = 7, 0, None, "", agent.CHILDREN
        self.is_running, self.is_due = True, False

    def signal(self, number):
        self.sent.append(signal.Signals(number).name)

    def wait(self, limit_s):
        assert limit_s == 0
        if self.status is not None:
            self.is_running, self.pid = False, None
        return self.status

    def start(self):
        self.is_running, self.is_due, self.pid = True, False, 8
        return True

    def check_progress(self):
        return 0

    def died(self, reason, status=None):
        self.reason = reason


class Parent(Agent):
    def _child(self, name, command):
        return FakeChild(name, command)


@pytest.fixture
def parent(folder):
    config = folder.config()
    commands = agent.child_commands(config, folder.file)
    hangup = Hangup()
    yield Parent(config, "id", commands, Stop(), FakeClock(), ConfigFile(folder.file), hangup)
    hangup.close()


def children(parent):
    return {child.name: child for child in parent.children}


def record(folder):
    return json.loads((folder.run_dir / "agent.json").read_text())["reload"]


def answer(folder, parent, **problems):
    """The link says that every plane has taken its part."""
    planes = {
        name: {"config": part, "problems": problems.get(name, [])} for name, part in parent._parts.items()
    }
    state_files.write_json(folder.run_dir / "link.json", {"planes": planes}, synced=False)
    parent._step()


def test_a_reload_gives_each_plane_its_part_and_ends_when_all_have_taken_it(folder, parent):
    folder.write({"nbd-0": ["a", "b"]})
    parent.reload("SIGHUP")
    assert {name: child.sent for name, child in children(parent).items()} == {
        "nbd-0": ["SIGHUP"],
        "link": ["SIGHUP"],
    }
    assert load_agent(folder.run_dir / "running.toml") == folder.config()
    part = json.loads((folder.run_dir / "nbd-0.config").read_text())
    assert [export["volume"] for export in part["export"]] == ["a", "b"]
    assert (record(folder)["state"], record(folder)["changes"]) == ("pending", ["exports added: b"])
    answer(folder, parent)
    assert record(folder)["state"] == "applied"


def test_a_refused_file_changes_nothing_and_is_said_to_the_link(folder, parent):
    running = (folder.run_dir / "running.toml").read_bytes()
    folder.file.write_text("colour = 3")
    parent.reload("SIGHUP")
    assert {name: child.sent for name, child in children(parent).items()} == {"nbd-0": [], "link": ["SIGHUP"]}
    assert (folder.run_dir / "running.toml").read_bytes() == running
    found = record(folder)
    assert (found["state"], found["cause"], found["number"]) == ("refused", "SIGHUP", 1)
    assert "colour: no such key" in found["text"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            'listen = "unix:',
            'listen = "tcp:gw\u00e4..x:1" #',
            r"listen: 'gw\u00e4\.\.x' is no name of a host",
        ),
        ('listen = "unix:', 'listen = "unix:\\u0000', r"plane\.0\.listen: 'unix:\\x00.* NUL"),
        ('file = "', 'file = "\\u0000', r"export\.0\.file: '\\x00.* NUL"),
        ("[[plane]]", f"spool_bytes = {'1' * 5000}\n[[plane]]", r"line 4: spool_bytes: 1{32}\.\.\. has more"),
        (
            "[[plane]]",
            f"spool_bytes = 0x{'f' * 5000}\n[[plane]]",
            "spool_bytes: 0xf{30}... is a number of more",
        ),
        ('runtime_dir = "', 'runtime_dir = "~nobody-has-it/', "runtime_dir: ~nobody-has-it/.*no such user"),
    ],
)
def test_values_that_cannot_be_used_are_refused_and_the_agent_lives(folder, parent, old, new, problem):
    folder.file.write_text(folder.file.read_text().replace(old, new))
    said = CliRunner().invoke(cli, ["run", "--check-config", "--config", str(folder.file)])
    assert said.exit_code == 78
    assert re.search(problem, said.output)
    parent.reload("the file was changed")
    assert record(folder)["state"] == "refused"
    assert re.search(problem, record(folder)["text"])
    assert children(parent)["link"].sent == ["SIGHUP"]


def test_a_fault_of_the_agent_ends_the_reload_and_not_the_agent(folder, parent, monkeypatch):
    folder.write({"nbd-0": ["a", "b"]})
    with monkeypatch.context() as patch:
        patch.setattr(agent, "prepare", lambda *_: 1 / 0)
        parent.reload("SIGHUP")
    assert record(folder)["state"] == "refused"
    assert "ZeroDivisionError" in record(folder)["text"]
    assert {name: child.sent for name, child in children(parent).items()} == {"nbd-0": [], "link": ["SIGHUP"]}
    with monkeypatch.context() as patch:
        patch.setattr(parent, "_change_planes", lambda _: 1 / 0)
        parent.reload("SIGHUP")
    answer(folder, parent)
    parent._each_second()
    assert record(folder)["state"] == "incomplete", "whatever the planes say"
    parent.reload("SIGHUP")
    answer(folder, parent)
    assert record(folder)["state"] != "incomplete"


def test_the_same_file_is_unchanged_but_credentials_are_read_again(folder, parent):
    parent.reload("SIGHUP")
    answer(folder, parent)
    assert record(folder)["state"] == "unchanged"
    assert children(parent)["nbd-0"].sent == children(parent)["link"].sent == ["SIGHUP"]


def test_a_command_behind_the_editor_shows_what_was_found_just_before(folder, parent):
    folder.write({"nbd-0": ["a", "b"]})
    parent.reload("the file was changed")
    parent.reload("SIGHUP")
    answer(folder, parent)
    assert (record(folder)["state"], record(folder)["changes"]) == ("applied", ["exports added: b"])
    parent._clock.advance(61)
    parent.reload("SIGHUP")
    answer(folder, parent)
    assert record(folder)["state"] == "unchanged"


def test_a_new_plane_is_started_before_the_link_and_a_removed_one_ends_by_itself(folder, parent):
    folder.write({"nbd-0": ["a"], "nbd-1": ["b"]})
    parent.reload("SIGHUP")
    assert list(children(parent)) == ["nbd-0", "nbd-1", "link"]
    assert children(parent)["nbd-1"].command[-1] == "nbd-1"
    folder.write({"nbd-0": ["a"]})
    parent.reload("SIGHUP")
    removed = children(parent)["nbd-1"]
    assert removed.sent == ["SIGHUP"]
    assert json.loads((folder.run_dir / "nbd-1.config").read_text())["export"] == []
    removed.status = 0
    parent._step()
    assert list(children(parent)) == ["nbd-0", "link"]


def test_a_removed_plane_that_does_not_end_is_asked_to(folder, parent):
    folder.write({"nbd-1": ["b"]})
    parent.reload("SIGHUP")
    removed = children(parent)["nbd-0"]
    parent._clock.advance(29)
    parent._each_second()
    assert removed.sent == ["SIGHUP"]
    parent._clock.advance(1)
    parent._each_second()
    assert removed.sent == ["SIGHUP", "SIGTERM"]


def test_the_link_starts_again_for_its_own_settings_behind_the_planes_that_go(folder, parent):
    folder.write({"nbd-0": ["a"], "nbd-1": ["b"]})
    parent.reload("SIGHUP")
    link = children(parent)["link"]
    folder.write({"nbd-0": ["a"]}, top='server = "127.0.0.1:9"\n')
    parent.reload("SIGHUP")
    assert "SIGTERM" not in link.sent, "it has not the last counts of nbd-1 yet"
    children(parent)["nbd-1"].status = 0
    parent._step()
    parent._each_second()
    assert link.sent[-1] == "SIGTERM"
    link.status = 0
    parent._step()
    assert children(parent)["link"] is not link, "at once, and not as one that has died"
    children(parent)["link"].status = 1
    parent._step()
    assert children(parent)["link"].reason == "it ended with status 1"


def test_what_needs_a_restart_is_named_and_no_child_sees_it(folder, parent):
    folder.write({"nbd-0": ["a", "b"]})
    folder.file.write_text(folder.file.read_text().replace('"gw-a"', '"gw-b"'))
    parent.reload("SIGHUP")
    assert (record(folder)["needs_restart"], record(folder)["changes"]) == (["name"], ["exports added: b"])
    found = load_agent(folder.run_dir / "running.toml")
    assert (found.name, [export.volume for export in found.export]) == ("gw-a", ["a", "b"])


def test_a_plane_that_takes_no_part_or_not_all_of_it_is_named(folder, parent):
    folder.write({"nbd-0": ["a", "b"]})
    parent.reload("SIGHUP")
    answer(folder, parent, **{"nbd-0": ["unix:x: cannot listen"]})
    assert (record(folder)["state"], record(folder)["text"]) == ("incomplete", "nbd-0: unix:x: cannot listen")
    parent._each_second()
    answer(folder, parent)
    parent._each_second()
    assert record(folder)["state"] == "applied", "it has succeeded since"
    folder.write({"nbd-0": ["a"]})
    parent.reload("SIGHUP")
    parent._step()
    assert record(folder)["state"] == "pending"
    parent._clock.advance(10)
    parent._step()
    assert record(folder)["text"] == "nbd-0 has not confirmed its part"


def test_a_command_behind_an_incomplete_reload_does_not_call_it_complete(folder, parent):
    folder.write({"nbd-0": ["a", "b"]})
    parent.reload("the file was changed")
    answer(folder, parent, **{"nbd-0": ["unix:x: cannot listen"]})
    for wait_s in (0, 61):
        parent._clock.advance(wait_s)
        parent.reload("SIGHUP")
        parent._step()
        assert record(folder)["state"] == "incomplete"
        assert record(folder)["text"] == "nbd-0: unix:x: cannot listen"
    answer(folder, parent)
    parent._each_second()
    assert record(folder)["state"] == "unchanged", "it has succeeded since"


def test_limits_of_a_group_that_left_are_released_when_the_link_that_set_them_has_ended(
    folder, parent, monkeypatch
):
    released, group = [], '[[cgroup]]\nname = "x"\nbackend = "b"\ngroup = "x.service"\ndevice = "sda"\n'
    monkeypatch.setattr(agent.cgroups, "release", lambda groups: released.extend(groups) or [])
    folder.write({"nbd-0": ["a"], "nbd-1": ["b"]}, more=group)
    parent.reload("SIGHUP")
    link = children(parent)["link"]
    link.status = 0
    parent._step()
    link = children(parent)["link"]
    folder.write({"nbd-0": ["a"]})
    parent.reload("SIGHUP")
    children(parent)["nbd-1"].status = 0
    parent._step()
    parent._each_second()
    assert link.sent[-1] == "SIGTERM"
    assert released == [], "this link would set them again"
    link.status = 0
    parent._step()
    assert released == [("x.service", "sda")]


def test_limits_of_a_qemu_that_left_are_released_too(folder, parent, monkeypatch):
    released, entry = [], '[[qemu]]\nname = "vm"\nsocket = "/vm.qmp"\n'
    entry += 'volume = [{name = "a", drive = "d0", backend = "b"}]\n'
    monkeypatch.setattr(Agent, "_release_qemu", lambda _agent, places: released.extend(sorted(places)))
    folder.write({"nbd-0": ["a"]}, more=entry)
    parent.reload("SIGHUP")
    children(parent)["link"].status = 0
    parent._step()
    folder.write({"nbd-0": ["a"]})
    parent.reload("SIGHUP")
    assert released == []
    children(parent)["link"].status = 0
    parent._step()
    assert released == [("/vm.qmp", "drive", "d0")]


def test_a_group_that_cannot_be_released_ends_nothing(monkeypatch):
    tried = []

    def broken(groups):
        tried.extend(groups)
        raise OSError(36, "File name too long")

    monkeypatch.setattr(agent.cgroups, "release", broken)
    Agent._release([("/x", "sda"), ("/y", "sda")])
    assert tried[0] == ("/x", "sda"), "it was tried, and its failure stays there"


def test_a_full_disk_refuses_the_reload(folder, parent, monkeypatch):
    folder.write({"nbd-0": ["a", "b"]})

    def full(path, _value, **_more):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(agent.state_files, "write_json", full)
    parent.reload("SIGHUP")
    assert children(parent)["nbd-0"].sent == []
    assert parent._record.state == "refused"
    assert "No space left" in parent._record.text


def test_planes_that_the_link_does_not_know_are_behind():
    assert planes_behind({"nbd-0": "1"}, {}) == (["nbd-0"], [])
    said = {"planes": {"nbd-0": {"config": "1"}, "nbd-1": {"config": "0"}}}
    assert planes_behind({"nbd-0": "1", "nbd-1": "1"}, said) == (["nbd-1"], [])


def test_changes_are_recent_for_a_minute_and_only_of_a_reload_that_succeeded():
    made = ReloadRecord(1, 0, "SIGHUP", "applied", changes=["x"])
    assert made.recent_changes(59_000_000) == ["x"]
    assert made.recent_changes(60_000_000) == []
    assert made.ended("refused").recent_changes(0) == []
