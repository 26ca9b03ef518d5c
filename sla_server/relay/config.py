"""Configuration of a relay: one TOML file, and a folder of documents beside it.

``SLA_RELAY__KEY=value`` in the environment overrides a key.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from pmdaemon.mailbox import default_runtime_dir
from pmdaemon.runtime import config as files
from sla_server.events.config import EventsConfig
from sla_server.events.receiver.config import PlainName, ReceiverConfig, ReceiverTlsConfig
from sla_server.events.recipients.config import NotifyConfig

ENV_PREFIX: Final = "SLA_RELAY__"
FILE: Final = "relay.toml"
"""Within a folder that is given in place of a file."""


class RelayConfig(ReceiverConfig):
    """The file of ``sla-server relay``."""

    name: PlainName = "relay"
    """Of this relay, in its own events."""
    data_dir: Path = Path("relay-data")
    """Everything durable: queues, memory of identities, secrets. A relative path begins at the file."""
    runtime_dir: Path | None = None
    """State and figures for `sla-server relay status`, on tmpfs; default: a private directory (systemd's or
    in /dev/shm)."""
    documents: Path = Path()
    """Folder of the documents of recipients, routes and silences (*.yaml), or one file; a relative path
    begins at the configuration file. Changes are taken up within a second."""
    confirm: Literal["record", "final"] = "record"
    """When a server's post is confirmed: once its events are on disk here, or once all recipients here have
    confirmed them."""
    final_wait_s: float = Field(default=5.0, gt=0, le=60)
    """With `confirm = "final"`: how long an answer waits for the recipients; then the server is asked to come
    again. Below the `timeout` of its recipient."""
    identities: int = Field(default=50_000, ge=1000, le=10_000_000)
    """So many events are known after they were delivered, so that a repeat of one is dropped."""
    events: EventsConfig = Field(default_factory=EventsConfig)
    notify: NotifyConfig = Field(default_factory=NotifyConfig)

    @property
    def runbook_url(self) -> str:
        """Page that links of notices lead to; a relay has none of its own."""
        return self.notify.runbook("")

    @model_validator(mode="after")
    def _is_no_server(self) -> Self:
        if self.events.receive is not None:
            raise ValueError("events.receive: the top of a relay's file has these keys; move them there")
        if self.events.pair.enabled:
            raise ValueError(
                "events.pair: a relay has no partner; send the server's events to two relays instead"
            )
        self.check_body(self.events.queue_bytes)
        return self


class ResolvedRelayConfig(RelayConfig):
    """The same with all paths absolute."""

    runtime_dir: Path

    @property
    def secrets_dir(self) -> Path:
        """Where the files of secrets are."""
        return self.data_dir / self.notify.secrets_dir


def load(path: Path) -> ResolvedRelayConfig:
    """Read the file, or ``relay.toml`` in a folder, and the environment.

    Raises:
        ConfigError: names the file, the key, the value and what is expected.
    """
    if path.is_dir():
        path = path / FILE
    config = files.load(RelayConfig, path, prefix=ENV_PREFIX)
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
        tls=ReceiverTlsConfig(
            cert_file=tls.cert_file and at_base(tls.cert_file),
            key_file=tls.key_file and at_base(tls.key_file),
        ),
    )
    return ResolvedRelayConfig.model_construct(**values)
