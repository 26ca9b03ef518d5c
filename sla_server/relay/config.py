"""Configuration of a relay: one TOML file, and a folder of documents beside it.

``SLA_RELAY__KEY=value`` in the environment overrides a key.
"""

from __future__ import annotations

import hashlib
import ipaddress
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from pmdaemon.errors import ConfigError
from pmdaemon.mailbox import default_runtime_dir
from pmdaemon.runtime import config as files
from pmdaemon.runtime.config import StrictModel, parse_address
from sla_server.events.config import EventsConfig
from sla_server.events.documents import FileName
from sla_server.events.recipients.config import NotifyConfig

ENV_PREFIX: Final = "SLA_RELAY__"
FILE: Final = "relay.toml"
"""Within a folder that is given in place of a file."""


def _address(value: str) -> str:
    parse_address(value)
    return value


class RelayTlsConfig(StrictModel):
    """Certificate of the relay; TLS 1.3. Files that change are read again with the next connection."""

    cert_file: Path | None = None
    """PEM, with the certificates between it and the one that senders trust. A relative path begins at the
    configuration file."""
    key_file: Path | None = None
    """PEM, without a password."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together; give both or neither")
        return self


class SenderConfig(StrictModel):
    """A server that may send events: ``url`` of its recipient ends in /events/NAME."""

    name: FileName
    """Of the address, and in figures; the servers of a cooperating pair have one each."""
    secret_file: FileName
    """File in notify.secrets_dir with the key of the signature: what the recipient's secret_file holds."""


class RelayConfig(StrictModel):
    """The file of ``sla-server relay``."""

    name: FileName = "relay"
    """Of this relay, in its own events."""
    data_dir: Path = Path("relay-data")
    """Everything durable: queues, memory of identities, secrets. A relative path begins at the file."""
    runtime_dir: Path | None = None
    """State and figures for `sla-server relay status`, on tmpfs; default: a private directory (systemd's or in
    /dev/shm)."""
    documents: Path = Path(".")
    """Folder of the documents of recipients, routes and silences (*.yaml), or one file; a relative path begins
    at the configuration file. Changes are taken up within a second."""
    listen: Annotated[str, AfterValidator(_address)] = "127.0.0.1:7430"
    """Address and port for the webhooks of servers; other addresses than loopback need `[tls]`."""
    plain: bool = False
    """Listen without TLS on an address that is not loopback: whoever is on the way can read the events."""
    confirm: Literal["record", "final"] = "record"
    """When a server's post is confirmed: once its events are on disk here, or once all recipients here have
    confirmed them."""
    final_wait_s: float = Field(default=5.0, gt=0, le=60)
    """With `confirm = "final"`: how long an answer waits for the recipients; then the server is asked to come
    again. Below the `timeout` of its recipient."""
    max_body_bytes: int = Field(default=4 << 20, ge=64 << 10, le=64 << 20)
    """A larger body is refused (413) unread; the server then sends its notices singly."""
    requests_per_s: float = Field(default=50.0, gt=0, le=100_000)
    """Of one host; what is more is asked to come again (429)."""
    identities: int = Field(default=50_000, ge=1000, le=10_000_000)
    """So many events are known after they were delivered, so that a repeat of one is dropped."""
    tls: RelayTlsConfig = Field(default_factory=RelayTlsConfig)
    sender: list[SenderConfig] = Field(default_factory=list, max_length=100)
    events: EventsConfig = Field(default_factory=EventsConfig)
    notify: NotifyConfig = Field(default_factory=NotifyConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [each.name for each in self.sender]
        if len(set(names)) != len(names):
            raise ValueError(f"sender: a name is there twice ({', '.join(names)}); give each its own")
        host = parse_address(self.listen)[0]
        if self.tls.cert_file is None and not self.plain and not ipaddress.ip_address(host).is_loopback:
            raise ValueError(
                f"listen: {self.listen} is no address of this host alone, and there is no certificate; give "
                "tls.cert_file and tls.key_file, listen on 127.0.0.1, or set plain = true"
            )
        return self


class ResolvedRelayConfig(RelayConfig):
    """The same with all paths absolute."""

    runtime_dir: Path


def load(path: Path) -> ResolvedRelayConfig:
    """Read the file, or ``relay.toml`` in a folder, and the environment.

    Raises:
        ConfigError: names the file, the key, the value and what is expected.
    """
    if path.is_dir():
        path = path / FILE
    config = files.load(RelayConfig, path, prefix=ENV_PREFIX)
    if not config.sender:
        fix = "Add [[sender]] with name and secret_file for each server that sends events here"
        raise ConfigError(str(path), "sender: nothing may send events", fix)
    base = path.absolute().parent

    def at_base(given: Path) -> Path:
        return base / given.expanduser()

    data_dir, tls = at_base(config.data_dir), config.tls
    runtime_dir = config.runtime_dir
    if runtime_dir is None:
        tag = hashlib.blake2b(str(data_dir).encode(), digest_size=4).hexdigest()
        runtime_dir = default_runtime_dir() / f"relay-{tag}"
    values = dict(config)
    values.update(
        data_dir=data_dir,
        runtime_dir=at_base(runtime_dir),
        documents=at_base(config.documents),
        tls=RelayTlsConfig(
            cert_file=tls.cert_file and at_base(tls.cert_file), key_file=tls.key_file and at_base(tls.key_file)
        ),
    )
    return ResolvedRelayConfig.model_construct(**values)
