"""Reserved memory and disk in which every process records its events (E2).

``layout`` is the file, ``writer`` the side of the process that raises events, ``reader`` that of the process
that delivers them, ``raising`` the one call for all processes, ``row`` what an event consists of. Imports no
program.

Design: docs/design/8-event-delivery.md.
"""

from pmdaemon.reserve.raising import EVENTS_DIR, attach_reserves, initialized, raise_event
from pmdaemon.reserve.reader import ReserveReader
from pmdaemon.reserve.row import event_row
from pmdaemon.reserve.writer import RecordOutcome, ReserveWriter

__all__ = [
    "EVENTS_DIR",
    "RecordOutcome",
    "ReserveReader",
    "ReserveWriter",
    "attach_reserves",
    "event_row",
    "initialized",
    "raise_event",
]
