"""Kinds of frame.

Wire kinds (below 64) travel between agent and PMDaemon, the rest between our processes, those from 128 on
between two servers.

The header of each kind is described in docs/formats/messages.md; unknown header keys are ignored.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

PROTO_MIN: Final = 1
PROTO_MAX: Final = 1


class Kind(IntEnum):
    """The second-last byte of a frame's prefix."""

    # agent -> PMDaemon
    HELLO = 1
    REGISTER = 2
    STREAMS = 3
    CUT = 4
    REPLY = 5
    CAPS_ACK = 6
    THRESHOLDS_ACK = 7
    ALERT = 8
    CA_QUERY = 9
    ENROL = 10
    RENEW = 11
    SPACE = 12
    # PMDaemon -> agent
    WELCOME = 16
    REGISTERED = 17
    POLL = 18
    CAPS = 19
    THRESHOLDS = 20
    CA_CERT = 21
    CERTIFICATE = 22
    COSTS = 23
    # both
    SCHEMA = 32
    UNSUPPORTED = 33
    ERROR = 34
    BYE = 35

    # between our processes: pair -> services, dbmanager
    CUTS = 64
    GATEWAY = 65
    STREAMS_SEEN = 66
    CAPS_STATE = 67
    GATEWAY_ALERT = 68
    # pair, dbmanager -> services
    PRESSURE = 69
    # pair -> services
    GATEWAY_SPACE = 70
    # services -> pair
    SET_CAPS = 72
    SET_THRESHOLDS = 73
    LEASE = 74
    SET_COSTS = 75
    # dbmanager -> pair
    WATERMARKS = 80
    DURABLE = 81
    # anyone -> dbmanager, and its answer
    RECORD = 88
    RECORDED = 89
    # appserver <-> services
    REQUEST = 96
    RESPONSE = 97
    SNAPSHOT = 98
    # agent's link <-> its data planes (control socket)
    DP_HELLO = 112
    DP_COLLECT = 113
    DP_CUT = 114
    DP_CAPS = 115
    DP_THRESHOLDS = 116
    DP_LEASE = 117
    DP_STATUS = 118
    DP_REPORT = 119
    # a plane's next process <-> its former one (control socket)
    DP_TAKE_OVER = 120
    DP_HAND_OVER = 121
    DP_TAKEN = 122
    # agent's link -> its data planes
    DP_COSTS = 123
    # event delivery <-> that of the partner server
    MIRROR_HELLO = 128
    MIRROR_WELCOME = 129
    MIRROR_EVENTS = 130
    MIRROR_KEPT = 131
    MIRROR_CONFIRMED = 132
    MIRROR_DELIVERED = 133
    MIRROR_BEAT = 134
