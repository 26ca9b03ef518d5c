import os
import signal

from pmdaemon.mailbox.segment import is_alive, start_ticks
from tests.support.mailbox import forked


def test_this_process_is_alive() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert is_alive(os.getpid(), ticks)


def test_another_process_under_a_reused_number_is_not_the_one_meant() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert not is_alive(os.getpid(), ticks - 1)
    assert not is_alive(0, ticks)


def test_a_zombie_and_a_reaped_process_are_gone() -> None:
    with forked(signal.pause) as pid:
        ticks = start_ticks(pid)
        assert ticks is not None
        assert is_alive(pid, ticks)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, not reaped: a zombie
        assert not is_alive(pid, ticks)
        os.waitpid(pid, 0)
        assert start_ticks(pid) is None
