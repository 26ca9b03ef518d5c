"""Configuration of event delivery: table ``[events]`` of the server's file."""

from __future__ import annotations

from pydantic import Field

from pmdaemon.runtime.config import StrictModel
from sla_server.events.receiver.config import ReceiverConfig


class EventsConfig(StrictModel):
    """How long events are kept and tried."""

    queue_bytes: int = Field(default=32 << 20, ge=16 << 20, le=1 << 40, multiple_of=256)
    """Room on disk for events that were not confirmed by all recipients; reserved at the first start. From
    80 % on, the recipient that is furthest behind gives up its oldest ones."""
    poll_interval_s: float = Field(default=0.05, gt=0, le=10)
    """How often the reserves of the processes are looked at."""
    give_up_h: float = Field(default=24.0, gt=0)
    """A notice that a recipient did not confirm for so long is a dead letter, and an event says so."""
    retry_first_s: float = Field(default=1.0, gt=0)
    """Pause after the first failure; it doubles with each further one."""
    retry_max_s: float = Field(default=900.0, gt=0)
    """The longest pause; also the longest that a recipient's own wish (Retry-After) is followed."""
    receive: ReceiverConfig | None = None
    """Take events of relays and other servers, by their webhook recipients; without the table none."""
