"""Configuration of event delivery: table ``[events]`` of the server's file."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from pmdaemon.runtime.config import StrictModel, parse_address
from pmdaemon.wire.names import is_name
from sla_server.events.receiver.config import ReceiverConfig


class EventPairConfig(StrictModel):
    """Two servers that keep each other's events: `docs/operations/pair.md`."""

    enabled: bool = False
    """Mirror events to the partner, keep its events, and deliver them while it is away."""
    name: str = ""
    """This server's name, for which `sla ca pair NAME` has made its certificate."""
    partner: str = ""
    """The partner's name; no certificate of another name is accepted."""
    listen: str = "127.0.0.1:7413"
    """"IP:PORT" where the partner dials in."""
    address: str = ""
    """"IP:PORT" of the partner, its `listen`."""
    certificate: Path = Path("pair/pair.pem")
    """Key and certificate of this server, from `sla ca pair`; a relative path is one within data_dir. A file
    that has been replaced is used from the next connection on."""
    authority: Path = Path("pair/ca.crt")
    """The certificate of the authority that issued those of both servers; a relative path as above."""
    silence_s: float = Field(default=10.0, ge=0.5, le=3600)
    """A partner that was not heard for so long, on neither connection, is lost: its events are delivered
    here. A partition looks the same on both sides."""
    mirror_bytes: int = Field(default=32 << 20, ge=1 << 20, le=1 << 40, multiple_of=256)
    """Room on disk for the partner's events; reserved at the first start. As large as its `queue_bytes`, it
    holds all that the partner can have."""

    @field_validator("name", "partner")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if value and not is_name(value):
            raise ValueError("a name has 1-128 of letters, digits and . _ : @ -, first a letter or digit")
        return value

    @field_validator("listen", "address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value:
            parse_address(value)
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if not self.enabled:
            return self
        missing = [key for key in ("name", "partner", "listen", "address") if not getattr(self, key)]
        if missing:
            raise ValueError(f"with enabled = true these have to be set: {', '.join(missing)}")
        if self.name == self.partner:
            raise ValueError(f"name and partner are both {self.name}; each server has a name of its own")
        if parse_address(self.address)[1] == 0:
            raise ValueError("address: port 0 cannot be dialled; name the port that the partner listens on")
        return self


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
    pair: EventPairConfig = Field(default_factory=EventPairConfig)

    @model_validator(mode="after")
    def _takes_bodies(self) -> Self:
        if self.receive is not None:
            self.receive.check_body(self.queue_bytes)
        return self
