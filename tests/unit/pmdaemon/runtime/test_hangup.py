import os
import signal
import threading

import pytest

from pmdaemon.runtime.hangup import Hangup, blocked


@pytest.fixture
def hangup():
    before = signal.getsignal(signal.SIGHUP)
    made = Hangup()
    yield made
    signal.signal(signal.SIGHUP, before)
    made.close()


def test_the_signal_is_taken_once_however_often_it_came(hangup):
    hangup.install()
    assert not hangup.take()
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    assert hangup.take()
    assert not hangup.take()


def test_a_signal_that_comes_before_the_handler_waits_for_it(hangup):
    with blocked():
        # To this thread: others of the test's process were there before, and do not block it.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGHUP)
        assert not hangup.take()
        hangup.install()
        assert hangup.take()


def test_another_signal_may_be_the_request():
    before = signal.getsignal(signal.SIGUSR2)
    made = Hangup(signal.SIGUSR2)
    try:
        made.install()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert made.take()
    finally:
        signal.signal(signal.SIGUSR2, before)
        made.close()
