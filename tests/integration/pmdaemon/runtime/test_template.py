"""Children forked from a process that has imported for them: real processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pmdaemon.runtime import template as template_module
from pmdaemon.runtime.children import Child, ChildKind
from pmdaemon.runtime.clock import SteadyClock
from pmdaemon.runtime.stop import ParentPipe
from pmdaemon.runtime.template import UNKNOWN_STATUS, NoTemplate, Template
from pmdaemon.runtime.watchdog import HUNG_STATUS

READY_S = 120.0
TOLD = """
import json, os, sys
fd = int(os.environ["TOLD_FD"])
os.write(fd, json.dumps({
    "argv": sys.argv[1:], "environment": dict(os.environ), "session": os.getsid(0), "pid": os.getpid(),
    "name": __name__, "preloaded": "xml.dom.minidom" in sys.modules,
    "title": open("/proc/self/cmdline").read(), "open": sorted(os.listdir("/proc/self/fd"), key=int),
}).encode())
os.read(int(os.environ["GO_FD"]), 1)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules of the tests are found by template and children."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    (tmp_path / "told.py").write_text(TOLD)
    return tmp_path


@pytest.fixture
def opened() -> Iterator[Callable[..., Template]]:
    with contextlib.ExitStack() as stack:

        def make(*modules: str) -> Template:
            made = Template(modules)
            stack.callback(made.close)
            made.open()
            assert made.wait_ready(READY_S)
            return made

        yield make


class Pipes:
    """By which a child tells of itself, and is let end."""

    def __init__(self) -> None:
        self.told, self.tells = os.pipe2(os.O_CLOEXEC)
        self.waits, self.go = os.pipe2(os.O_CLOEXEC)
        self.fds = (self.tells, self.waits)
        self.env = {**os.environ, "TOLD_FD": str(self.tells), "GO_FD": str(self.waits), "OF": "the child"}

    def close(self) -> None:
        for fd in (self.told, self.tells, self.waits, self.go):
            os.close(fd)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


@pytest.mark.usefixtures("folder")
def test_a_child_is_as_if_it_had_been_executed(opened: Callable[..., Template], pipes: Pipes) -> None:
    template = opened("xml.dom.minidom", "there_is_no_such_module")
    child = template.start(command("told", "7"), pipes.env, pipes.fds, has_session=True)
    told = json.loads(os.read(pipes.told, 1 << 16))
    assert (told["argv"], told["name"], told["preloaded"]) == (["7"], "__main__", True)
    assert told["pid"] == told["session"] == child.pid != template.pid
    assert told["title"].rstrip("\0") == " ".join(command("told", "7"))
    assert told["environment"] == pipes.env
    # its three, the two given, and the directory that is being listed; nothing of the template
    assert set(told["open"]) >= {"0", "1", "2", *map(str, pipes.fds)}
    assert len(told["open"]) == 7  # and the pipe by which it says how it ends
    os.write(pipes.go, b"1")
    assert child.wait() == 7
    child.send_signal(signal.SIGKILL)  # whoever has the id now is not meant


@pytest.mark.usefixtures("folder")
def test_children_run_side_by_side_and_die_of_signals(opened: Callable[..., Template], pipes: Pipes) -> None:
    template = opened()
    first, second = (
        template.start(command("told", "0"), pipes.env, pipes.fds, has_session=True) for _ in range(2)
    )
    first.send_signal(signal.SIGTERM)
    assert first.wait() == -signal.SIGTERM
    second.kill()
    assert second.wait() == -signal.SIGKILL
    assert template.reap(os.getpid()) == UNKNOWN_STATUS  # no child of the template


@pytest.mark.usefixtures("folder")
def test_without_its_template_a_child_is_executed(opened: Callable[..., Template], pipes: Pipes) -> None:
    template = opened()
    left = template.start(command("told", "0"), pipes.env, pipes.fds, has_session=True)
    assert template.pid is not None
    os.kill(template.pid, signal.SIGKILL)
    pipe = ParentPipe()
    env = {"TOLD_FD": str(pipes.tells), "GO_FD": str(pipes.waits)}
    child = Child(
        ChildKind("part"), "x", command("told", "3"), pipe, SteadyClock(), env=env, template=template
    )
    child.descriptors = pipes.fds
    os.read(pipes.told, 1 << 16)
    assert child.start(), "it is executed"
    told = json.loads(os.read(pipes.told, 1 << 16))
    assert os.stat(f"/proc/{told['pid']}").st_uid == os.getuid()
    assert int(Path(f"/proc/{told['pid']}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    os.write(pipes.go, b"11")
    assert child.wait(READY_S) == 3
    assert left.wait() == 0, "it says so itself"
    with pytest.raises(NoTemplate):  # it opens another one, for later
        template.start(command("told", "0"), pipes.env, pipes.fds, has_session=True)
    assert template.wait_ready(READY_S)
    again = template.start(command("told", "5"), pipes.env, pipes.fds, has_session=True)
    os.write(pipes.go, b"1")
    assert again.wait() == 5
    pipe.close()


def test_a_template_with_threads_forks_nothing(
    folder: Path, opened: Callable[..., Template], pipes: Pipes
) -> None:
    (folder / "threaded.py").write_text(
        "import threading, time\n"
        "t = threading.Thread(target=time.sleep, args=(600,), daemon=True)\nt.start()\n"
        "open('/proc/self/task/%d/comm' % t.native_id, 'w').write('sleeper')\n"
    )
    with pytest.raises(NoTemplate, match="it runs threads: sleeper"):
        opened("threaded").start(command("told", "0"), pipes.env, pipes.fds, has_session=True)


def test_what_is_no_module_of_python_is_executed(opened: Callable[..., Template], pipes: Pipes) -> None:
    with pytest.raises(NoTemplate):
        opened().start(["sleep", "1"], pipes.env, pipes.fds, has_session=True)


@pytest.mark.usefixtures("folder")
def test_a_template_that_was_stopped_is_not_waited_for(
    opened: Callable[..., Template], pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = opened()
    pid = template.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    asked: list[object] = []
    monkeypatch.setattr(template_module.socket, "send_fds", lambda *what: asked.append(what))
    with pytest.raises(NoTemplate):
        template.start(command("told", "0"), pipes.env, pipes.fds, has_session=True)
    assert not Path(f"/proc/{pid}").exists()
    assert asked == []
    assert template.check(), "it says so, once, and makes another one"
    assert template.pid not in (None, pid)
    assert template.check() == ""


def lose(template: Template) -> None:
    """Kill it, and see that another one takes its place."""
    pid = template.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.check() == "it ended with status -9"
    assert template.pid not in (None, pid)


@pytest.mark.usefixtures("folder")
def test_a_lost_template_is_noticed_and_its_children_say_how_they_end(
    opened: Callable[..., Template], pipes: Pipes
) -> None:
    """Parts that ended in order were taken for failed ones, and segments of 130 MB left behind."""
    template = opened()
    statuses = ("0", "7", "0")
    *children, killed = [
        template.start(command("told", status), pipes.env, pipes.fds, has_session=True) for status in statuses
    ]
    lose(template)
    killed.kill()
    assert killed.wait() == UNKNOWN_STATUS, "nobody can be asked, and it could say nothing"
    os.write(pipes.go, b"11")
    assert [child.wait() for child in children] == [0, 7]
    assert template.wait_ready(READY_S), "the new one was asked for nothing that is not its own"


@pytest.mark.usefixtures("folder")
def test_a_stop_of_the_whole_group_is_no_loss(opened: Callable[..., Template], pipes: Pipes) -> None:
    """systemd sends it to all processes of a unit; the PMDaemon logged an error at each stop."""
    template = opened()
    assert template.pid is not None
    os.kill(template.pid, signal.SIGTERM)
    child = template.start(command("told", "7"), pipes.env, pipes.fds, has_session=True)
    child.send_signal(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert template.check() == ""


def test_a_child_that_hangs_says_so_when_its_template_is_lost(
    folder: Path, opened: Callable[..., Template], pipes: Pipes
) -> None:
    (folder / "hangs.py").write_text(
        "import os\nfrom pmdaemon.runtime import threads\nos.read(int(os.environ['GO_FD']), 1)\n"
        "threads._end_hung('a thread hangs', lambda _text: None)\n"
    )
    template = opened()
    child = template.start(command("hangs"), pipes.env, pipes.fds, has_session=True)
    template.close()
    os.write(pipes.go, b"1")
    assert child.wait() == HUNG_STATUS


def test_a_child_of_which_nobody_was_told_does_not_run(
    folder: Path, opened: Callable[..., Template], pipes: Pipes
) -> None:
    """The template is lost after a fork: what is started instead must be the only one."""
    (folder / "lost.py").write_text("import os\nos.register_at_fork(after_in_parent=lambda: os._exit(1))\n")
    with pytest.raises(NoTemplate):
        opened("lost").start(command("told", "0"), pipes.env, pipes.fds, has_session=True)
    os.close(pipes.tells)
    assert os.read(pipes.told, 1 << 16) == b"", "it has ended, and told nothing"
    pipes.tells = os.open(os.devnull, os.O_WRONLY)


PARENT = """
import os, signal
from pmdaemon.runtime.template import Template
template = Template(())
template.open()
template.wait_ready(120)
print(template.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        assert parent.stdout.read() == "", "the template, which has the pipe, has ended, too"


FORKING = """
import json, os, signal, sys, xml.dom.minidom
from pmdaemon.runtime.template import Template
kept = os.open(os.devnull, os.O_RDONLY)
template = Template(("there_is_no_such_module",))
template.fork(has_session=len(sys.argv) > 1)
assert template.wait_ready(120)
fds = [int(os.environ[name]) for name in ("TOLD_FD", "GO_FD")]
command = [sys.executable, "-m", "told", "7"]
child = template.start(command, os.environ, fds, has_session=False)
print(json.dumps({"child": child.pid, "template": os.getsid(template.pid)}), flush=True)
print(child.wait(), flush=True)
os.kill(template.pid, signal.SIGKILL)
os.waitid(os.P_PID, template.pid, os.WEXITED | os.WNOWAIT)
print(template.check(), os.getsid(template.pid) == os.getsid(0), flush=True)
template.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize("own_session", [False, True])
def test_a_fork_of_its_parent_shares_imports_and_nothing_else(
    folder: Path, pipes: Pipes, own_session: bool
) -> None:
    (folder / "forking.py").write_text(FORKING)
    with subprocess.Popen(
        [sys.executable, str(folder / "forking.py"), *["own"] * own_session],
        stdout=subprocess.PIPE,
        text=True,
        env=pipes.env,
        pass_fds=pipes.fds,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        told = json.loads(os.read(pipes.told, 1 << 16))
        os.write(pipes.go, b"1")
        line, *rest = parent.stdout
    said = json.loads(line)
    assert (told["argv"], told["name"], told["preloaded"]) == (["7"], "__main__", True)
    assert told["pid"] == said["child"]
    assert told["title"].rstrip("\0") == " ".join(command("told", "7"))
    assert told["session"] == said["template"]
    assert (said["template"] == parent.pid) is not own_session
    assert len(told["open"]) == 7, (
        "its three, the two given, its status, and the directory that is being listed"
    )
    lost = f"it ended with status -9 {not own_session}\n"
    told_lines = [line for line in rest if "template-lost" not in line]  # which is logged
    assert told_lines == ["7\n", lost, "closed\n"], "only the parent has gone on"
    assert parent.returncode == 0


IGNORING = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from pmdaemon.runtime.template import Template
template = Template(())
template.fork(has_session=True)
assert template.wait_ready(120)
if len(sys.argv) > 1:
    os.kill(template.pid, signal.SIGKILL)
    while os.path.exists(f"/proc/{template.pid}"):
        time.sleep(0.01)
    assert template.check()
template.close()
"""


@pytest.mark.parametrize("lost", [False, True])
def test_whoever_started_us_may_ignore_the_end_of_children(lost: bool) -> None:
    """The kernel reaps then: each stop, and the loss of a template, ended the server by an error."""
    subprocess.run([sys.executable, "-c", IGNORING, *["lost"] * lost], check=True)


CLOSED = """
import os, sys
from pmdaemon.runtime.template import Template
template = Template(())
template.fork(has_session=True)
is_ready = template.wait_ready(120)
template.close()
os._exit(0 if is_ready else 1)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_the_standard_streams_may_be_closed(closed: str) -> None:
    subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, CLOSED], check=True)


@pytest.mark.usefixtures("folder")
def test_one_that_replaces_another_is_watched_too(opened: Callable[..., Template]) -> None:
    """Only the first loss was noticed, until another child was to start."""
    template = opened()
    for _ in range(2):
        lose(template)
        poller = select.poll()
        assert template._socket is not None
        poller.register(template._socket, select.POLLIN)
        assert poller.poll(READY_S * 1000), "the next one has imported everything, and nobody has asked it"
        assert template.check() == ""


@pytest.mark.usefixtures("folder")
def test_a_child_has_the_limits_of_who_asked_for_it(opened: Callable[..., Template], pipes: Pipes) -> None:
    """The PMDaemon raises its limit later than it forks; with many files open it could start no pair."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        template = opened()
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        high = fcntl.fcntl(pipes.tells, fcntl.F_DUPFD_CLOEXEC, 900)
        env = {**pipes.env, "TOLD_FD": str(high)}
        child = template.start(command("told", "7"), env, (high, pipes.waits), has_session=True)
        os.close(high)
        os.write(pipes.go, b"1")
        assert child.wait() == 7
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


HUNG_UP = """
import os, signal, sys
from pmdaemon.runtime.hangup import blocked
from pmdaemon.runtime.template import Template
template = Template(())
with blocked():
    template.fork(has_session=True)
assert template.wait_ready(120)
fds = [int(os.environ[name]) for name in ("TOLD_FD", "GO_FD")]
child = template.start([sys.executable, "-m", "told", "7"], os.environ, fds, has_session=True)
child.send_signal(signal.SIGHUP)
os.write(int(os.environ["LETS_GO"]), b"1")
print(child.wait())
template.close()
"""


@pytest.mark.usefixtures("folder")
def test_a_hangup_that_has_waited_does_not_end_a_child(pipes: Pipes) -> None:
    """The frames above the fork unblock it: a PMDaemon that ended in order was called killed by SIGHUP."""
    said = subprocess.run(
        [sys.executable, "-c", HUNG_UP],
        env={**pipes.env, "LETS_GO": str(pipes.go)},
        pass_fds=(*pipes.fds, pipes.go),
        stdout=subprocess.PIPE,
        check=True,
    )
    assert said.stdout == b"7\n"


KILLED = """
import os, select, signal
from pmdaemon.runtime.template import Template
template = Template(())
template.fork(has_session=True)
poller = select.poll()
poller.register(template._socket, select.POLLIN)
poller.poll()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_without_a_word_when_its_parent_is_killed_with_an_answer_unread() -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, check=False)
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, b"")


@pytest.mark.usefixtures("folder")
def test_a_start_for_which_descriptors_are_missing_keeps_none(
    opened: Callable[..., Template], pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try took two more of a process that had too few."""
    template = opened()
    made: list[tuple[int, int]] = []

    def pipe2(flags: int) -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(os.pipe2(flags))
        return made[0]

    monkeypatch.setattr(template_module, "os", SimpleNamespace(**{**vars(os), "pipe2": pipe2}))
    with pytest.raises(OSError, match="Too many open files"):
        template.start(command("told", "0"), pipes.env, pipes.fds, has_session=True)
    for fd in made[0]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
