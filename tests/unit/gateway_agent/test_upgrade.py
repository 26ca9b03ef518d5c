"""An upgrade as the parent does it: what is left to the next program, and which process of a plane serves."""

import json
import signal

import pytest

from gateway_agent import agent, upgrade
from gateway_agent.agent import Agent
from gateway_agent.config import load_agent
from gateway_agent.errors import UpgradeFailed
from gateway_agent.link import state_files
from gateway_agent.reload import ConfigFile
from gateway_agent.status import upgrade_lines
from gateway_agent.upgrade import LINK_WAIT_NS, TAKEOVER_NS, ParentState, UpgradeRecord
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import ParentPipe, Stop

LINK_PID = 70


class FakeChild:
    """What the agent uses of a child; ``sent`` are its signals."""

    def __init__(self, name, command, clock):
        self.name, self.command, self.sent, self.starts = name, command, [], 0
        self.pid, self.restarts, self.status, self.hung, self.kind = None, 0, None, "", agent.CHILDREN
        self._clock = clock
        self.due_ns = clock.monotonic_ns()
        self.reason = ""

    @property
    def is_running(self):
        return self.pid is not None

    @property
    def is_due(self):
        return self.pid is None and self._clock.monotonic_ns() >= self.due_ns

    def adopt(self, pid, _since_unix_us):
        if pid == 404:
            raise ProcessLookupError
        self.pid, self.starts = pid, 1

    def signal(self, number):
        self.sent.append(signal.Signals(number).name)

    def wait(self, _limit_s):
        if self.status is not None:
            self.pid = None
        return self.status

    def start(self):
        self.starts += 1
        self.pid, self.status = LINK_PID if self.name == "link" else 80, None
        return True

    def check_progress(self):
        return 0

    def died(self, reason, status=None):
        self.reason = reason


class Parent(Agent):
    def _child(self, name, command):
        return FakeChild(name, command, self._clock)


class Host:
    """A folder with the configuration in force, and the program behind an upgrade."""

    def __init__(self, folder):
        self.folder, self.run_dir, self.file = folder, folder / "r", folder / "agent.toml"
        self.run_dir.mkdir()
        text = f'name = "gw-a"\nstate_dir = "{folder}/s"\nruntime_dir = "{folder}/r"\n'
        for plane, volume in (("nbd-0", "a"), ("nbd-1", "b")):
            (folder / f"{volume}.img").write_bytes(bytes(512))
            text += f'[[plane]]\nname = "{plane}"\nlisten = "unix:{folder}/{plane}"\n'
            text += f'[[export]]\nvolume = "{volume}"\nbackend = "b"\nplane = "{plane}"\n'
            text += f'file = "{folder}/{volume}.img"\n'
        self.file.write_text(text)
        self.running = self.run_dir / "running.toml"
        self.running.write_text(text)
        self.clock = FakeClock()

    def parent(self, left=None, become=None):
        config = load_agent(self.file)
        commands = agent.child_commands(config, None)
        file = ConfigFile(self.file)
        return Parent(config, "id", commands, Stop(), self.clock, file, become=become, left=left)

    def left(self, **more):
        pipe = ParentPipe()
        record = UpgradeRecord(1, 5, "pending", former="0.0.9")
        return ParentState(record, 3, str(self.running), [], pipe.descriptors, **more)

    def said(self):
        return json.loads((self.run_dir / "agent.json").read_text())

    def link_knows(self, *planes):
        said = {"pid": LINK_PID, "planes": {name: {"connected": True} for name in planes}}
        state_files.write_json(self.run_dir / "link.json", said, synced=False)

    def hand_over(self, name):
        (self.run_dir / f"{name}.sock").touch()


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def children(parent):
    return {child.name: child for child in parent.children}


# -- the program before


def test_what_is_left_can_be_read_also_with_keys_of_a_later_release():
    made = ParentState(
        UpgradeRecord(3, 5, "pending", former="0.1.0"), 7, "/r/running.toml", [5], [3, 4], {"nbd-0": 9}
    )
    said = json.loads(made.encode())
    assert ParentState.parse(json.dumps(said)) == made
    del said["reloads"], said["is_asked_to_reload"]  # of a release before
    assert ParentState.parse(json.dumps(said)) == made
    said["record"]["colour"] = said["colour"] = 1
    assert ParentState.parse(json.dumps(said)) == made


def test_an_upgrade_leaves_the_planes_and_those_that_still_let_their_clients_go(host, monkeypatch):
    checked, found = [], []
    monkeypatch.setattr(upgrade, "check_program", checked.append)
    monkeypatch.setattr(agent, "stop_together", lambda stopped, _clock: [each.wait(0) for each in stopped])
    parent = host.parent(host.left(planes={"nbd-0": 11}, leaving={"nbd-1.9": 9}), found.append)
    parent._step()
    host.link_knows("nbd-0")
    parent._step()
    parent._step()
    host.hand_over("nbd-0.11")
    parent._step()
    assert parent._upgrade.state == "done"
    parent.upgrade()
    assert checked == [host.running]
    [left] = found
    assert left.planes == {"nbd-0": 80, "nbd-1": 80}
    assert left.leaving == {"nbd-0.11": 11, "nbd-1.9": 9}
    assert (left.record.number, left.record.state, left.since_unix_us) == (2, "pending", 3)
    assert left.pipe == parent._pipe.descriptors
    assert host.said()["upgrade"]["state"] == "pending"


def test_a_program_that_cannot_run_here_changes_nothing(host, monkeypatch):
    def refuse(_path):
        raise UpgradeFailed("the new program refuses to start: colour: no such key")

    monkeypatch.setattr(upgrade, "check_program", refuse)
    parent = host.parent(become=lambda _left: pytest.fail("it was replaced"))
    parent._step()
    parent.upgrade()
    record = host.said()["upgrade"]
    assert (record["number"], record["state"]) == (1, "refused")
    assert "colour: no such key. Nothing was changed" in record["text"]
    assert [child.sent for child in parent.children] == [[], [], []]


def test_a_program_that_cannot_be_executed_lets_this_one_go_on(host, monkeypatch):
    monkeypatch.setattr(upgrade, "check_program", lambda _path: None)
    monkeypatch.setattr(agent, "stop_together", lambda _stopped, _clock: None)

    def fail(_left):
        raise FileNotFoundError(2, "No such file or directory")

    parent = host.parent(become=fail)
    parent.upgrade()
    assert host.said()["upgrade"]["state"] == "refused"
    assert "exec: No such file" in host.said()["upgrade"]["text"]


def test_reloads_are_counted_on_and_one_that_comes_meanwhile_is_done_by_the_next_program(host, monkeypatch):
    """`gateway-agent reload` waits for a greater number than it saw."""
    monkeypatch.setattr(upgrade, "check_program", lambda _path: parent._hangup.set())
    monkeypatch.setattr(agent, "stop_together", lambda _stopped, _clock: None)
    found = []
    parent = host.parent(become=lambda left: found.append(ParentState.parse(left.encode())))
    parent.reload("a test")
    parent.upgrade()
    [left] = found
    assert (left.reloads, left.is_asked_to_reload) == (1, True)
    following = host.parent(left)
    assert host.said()["reload"]["number"] == 1
    following.publish()
    assert (host.said()["reload"]["number"], host.said()["reload"]["state"]) == (1, "none")
    following._step()
    assert (host.said()["reload"]["number"], host.said()["reload"]["cause"]) == (2, "SIGHUP")


# -- the next program


def test_next_processes_wait_for_the_link_and_the_former_ones_are_named_by_their_ids(host):
    parent = host.parent(host.left(planes={"nbd-0": 11, "nbd-1": 12}))
    parent._step()
    assert list(children(parent)) == ["nbd-0", "nbd-1", "nbd-0.11", "nbd-1.12", "link"]
    assert children(parent)["link"].is_running
    assert not children(parent)["nbd-0"].is_running, "the link would not hear of the change"
    parent.publish()
    assert (host.said()["handing_over"], host.said()["leaving"]) == (["nbd-0.11", "nbd-1.12"], [])
    host.link_knows("nbd-0")
    parent._step()
    parent._step()
    assert children(parent)["nbd-0"].command[-3:] == ("--plane", "nbd-0", "--take-over")
    assert [children(parent)[name].is_running for name in ("nbd-0", "nbd-1")] == [True, False]
    host.hand_over("nbd-0.11")
    parent._step()
    assert (host.said()["handing_over"], host.said()["leaving"]) == (["nbd-1.12"], ["nbd-0.11"])
    assert children(parent)["nbd-0"].command[-1] == "nbd-0", "started again it takes over from nobody"
    assert children(parent)["link"].sent == ["SIGHUP"]
    host.clock.advance(LINK_WAIT_NS / 1e9)
    parent._step()
    assert children(parent)["nbd-1"].is_running, "without a link in the end"
    host.hand_over("nbd-1.12")
    parent._step()
    assert host.said()["upgrade"] | {"release": ""} == {
        "number": 1, "at_unix_us": 5, "state": "done", "text": "", "former": "0.0.9", "release": ""
    }  # fmt: skip


def test_a_former_process_that_has_let_its_clients_go_is_not_started_again(host):
    parent = host.parent(host.left(planes={"nbd-0": 11, "nbd-1": 12}))
    parent._step()
    host.link_knows("nbd-0", "nbd-1")
    parent._step()
    parent._step()
    host.hand_over("nbd-0.11")
    parent._step()
    children(parent)["nbd-0.11"].status = 0
    children(parent)["nbd-1.12"].status = 0  # it had no clients, and was gone before the parent looked
    parent._step()
    parent._step()
    assert list(children(parent)) == ["nbd-0", "nbd-1", "link"]
    assert (host.said()["leaving"], host.said()["upgrade"]["state"]) == ([], "done")
    assert not (host.run_dir / "nbd-0.11.sock").exists()
    assert children(parent)["nbd-1"].command[-1] == "nbd-1"


def test_a_next_process_that_does_not_take_over_leaves_the_former_one_in_its_place(host):
    parent = host.parent(host.left(planes={"nbd-0": 11, "nbd-1": 12}))
    parent._step()
    host.link_knows("nbd-0", "nbd-1")
    parent._step()
    parent._step()
    children(parent)["nbd-0"].status = 78
    host.hand_over("nbd-1.12")
    parent._step()
    assert children(parent)["nbd-0"].pid == 11
    assert children(parent)["nbd-0"].command[-1] == "nbd-0"
    record = host.said()["upgrade"]
    assert record["state"] == "incomplete"
    assert record["text"].startswith("nbd-0: its new process did not take over, it ended with status 78")
    children(parent)["nbd-0"].status = -9
    parent._step()
    assert children(parent)["nbd-0"].reason, "it is started again like any plane"


def test_a_next_process_that_hangs_is_killed(host):
    parent = host.parent(host.left(planes={"nbd-0": 11}))
    parent._step()
    host.clock.advance(LINK_WAIT_NS / 1e9)
    parent._step()
    hanging = children(parent)["nbd-0"]
    host.clock.advance(TAKEOVER_NS / 1e9)
    parent._step()
    assert hanging.sent == ["SIGKILL"]
    hanging.status = -9
    parent._step()
    assert children(parent)["nbd-0"].pid == 11


def test_a_process_that_has_ended_meanwhile_gets_a_next_one_as_at_any_start(host):
    parent = host.parent(host.left(planes={"nbd-0": 404}, leaving={"nbd-1.404": 404}))
    parent._step()
    assert list(children(parent)) == ["nbd-0", "nbd-1", "link"]
    assert children(parent)["nbd-0"].is_running
    assert host.said()["upgrade"]["state"] == "done"


def test_a_file_that_was_edited_before_the_upgrade_is_read_behind_it(host):
    host.running.write_text(host.running.read_text() + "\n")
    parent = host.parent(host.left(planes={"nbd-0": 11}))
    parent._hangup.set()
    parent._step()
    assert parent._record.number == 0, "not while processes are replaced"
    host.clock.advance(LINK_WAIT_NS / 1e9)
    parent._step()
    host.hand_over("nbd-0.11")
    parent._step()
    assert parent._record.cause == "the upgrade"
    parent._step()
    assert parent._record.cause == "SIGHUP"


# -- for people


def test_an_upgrade_in_words_of_80_columns():
    record = UpgradeRecord(1, 0, "incomplete", "nbd-0: " + "x" * 90, "0.1.0", "0.2.0")
    said = {"upgrade": {name: getattr(record, name) for name in record.__slots__}, "leaving": ["nbd-1.4711"]}
    lines = list(upgrade_lines(said, 3_000_000))
    assert lines[0] == "upgrade  incomplete 3s ago (0.1.0 to 0.2.0)"
    assert lines[-1] == "         these let their clients go: nbd-1.4711"
    assert max(map(len, lines)) <= 80
