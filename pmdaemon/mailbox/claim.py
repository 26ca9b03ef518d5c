"""A name in a segment belongs to one living process at a time: how a process takes it over.

PID and START of the control block say who has it; a process of that PID that started at another time is a
stranger, and the name is free again.
"""

from __future__ import annotations

import fcntl
import os

from pmdaemon.mailbox.errors import ParticipantBusy
from pmdaemon.mailbox.layout import C_INCARNATION, C_PID, C_SLEEP, C_START, COUNT_LIMIT
from pmdaemon.mailbox.liveness import is_alive, start_ticks
from pmdaemon.mailbox.segment import Segment


def claim(segment: Segment, index: int, name: str) -> None:
    """Write our process into the participant's control block, unless another living one stands there.

    Raises:
        ParticipantBusy: it does.
    """
    words, control = segment.words, segment.layout.control_word(index)
    # Race: two processes of one name starting at once. The kernel drops this lock if we die here.
    fcntl.flock(segment.fd, fcntl.LOCK_EX)
    try:
        pid = words[control + C_PID]
        if pid != os.getpid() and is_alive(pid, words[control + C_START]):
            raise ParticipantBusy(name, pid)
        words[control + C_START] = start_ticks(os.getpid()) or 0
        words[control + C_PID] = os.getpid()
        words[control + C_INCARNATION] = (words[control + C_INCARNATION] + 1) % COUNT_LIMIT
        words[control + C_SLEEP] = 0
    finally:
        fcntl.flock(segment.fd, fcntl.LOCK_UN)
