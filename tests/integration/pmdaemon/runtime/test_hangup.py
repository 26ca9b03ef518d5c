import signal
import subprocess
import sys

from pmdaemon.runtime.hangup import blocked

CHILD = (
    "import sys; from pmdaemon.runtime.hangup import Hangup; sys.stdin.readline()\n"
    "hangup = Hangup(); hangup.install(); print(hangup.take())"
)


def test_a_child_that_is_started_blocked_takes_a_signal_that_came_too_early():
    with blocked():
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    child.send_signal(signal.SIGHUP)
    out, _ = child.communicate("\n", timeout=60)
    assert (child.returncode, out) == (0, "True\n")
