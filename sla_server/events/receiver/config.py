"""Configuration of what takes others' events: in a server ``[events.receive]``, in a relay's file the top."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from pmdaemon.runtime.config import ListenAddress, StrictModel, parse_address

QUEUE_PART: Final = 5
"""A body takes a fifth of the queue of events at most: below ``engine.FULL_RATIO`` nothing makes room."""
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Of a sender, and of a file in a directory of the configuration: no path."""


class ReceiverTlsConfig(StrictModel):
    """Certificate for senders; TLS 1.3. Files that change are read again with the next connection."""

    cert_file: Path | None = None
    """PEM, with the certificates between it and the one that senders trust. A relative path is one within
    data_dir, in a relay one beside its file."""
    key_file: Path | None = None
    """PEM, without a password."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together; give both or neither")
        return self


class SenderConfig(StrictModel):
    """A server or relay that may send events: ``url`` of its webhook recipient ends in /events/NAME."""

    name: PlainName
    """Of the address, and in figures; the servers of a cooperating pair have one each."""
    secret_file: PlainName
    """File in notify.secrets_dir with the key of the signature: what the recipient's secret_file holds."""


class ReceiverConfig(StrictModel):
    """Where posts are taken, of whom, and how much of them."""

    listen: ListenAddress = "127.0.0.1:7430"
    """Address and port for the webhooks of senders; other addresses than loopback need `tls`."""
    plain: bool = False
    """Listen without TLS on an address that is not loopback: whoever is on the way can read the events."""
    max_body_bytes: int = Field(default=4 << 20, ge=64 << 10, le=64 << 20)
    """A larger body is refused (413) unread; the sender then sends its notices singly. At most a fifth of
    `queue_bytes` of [events]."""
    requests_per_s: float = Field(default=50.0, gt=0, le=100_000)
    """Of one host; what is more is asked to come again (429)."""
    tls: ReceiverTlsConfig = Field(default_factory=ReceiverTlsConfig)
    sender: list[SenderConfig] = Field(default_factory=list, max_length=100)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [each.name for each in self.sender]
        if len(set(names)) != len(names):
            raise ValueError(f"sender: a name is there twice ({', '.join(names)}); give each its own")
        if not names:
            raise ValueError("sender: nothing may send events; add name and secret_file of each that may")
        host = parse_address(self.listen)[0]
        if self.tls.cert_file is None and not self.plain and not ipaddress.ip_address(host).is_loopback:
            raise ValueError(
                f"listen: {self.listen} is no address of this host alone, and there is no certificate; give "
                "tls.cert_file and tls.key_file, listen on 127.0.0.1, or set plain = true"
            )
        return self

    def check_body(self, queue_bytes: int) -> None:
        """Check that a body, which is taken whole or not at all, fits while the engine makes no room for it.

        Raises:
            ValueError: it may not.
        """
        if self.max_body_bytes * QUEUE_PART > queue_bytes:
            raise ValueError(
                f"max_body_bytes: {self.max_body_bytes:,} is more than a fifth of events.queue_bytes "
                f"({queue_bytes:,}), so that a body may never find room; set max_body_bytes to "
                f"{queue_bytes // QUEUE_PART:,} at most, or events.queue_bytes to "
                f"{self.max_body_bytes * QUEUE_PART:,} at least"
            )
