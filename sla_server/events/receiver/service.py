"""What takes posts, as one thing that a process starts and stops: handler, listener and their threads.

Thread: the main one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadDidNotStop, ThreadGroup
from sla_server.events.queue import QueuedEvent
from sla_server.events.receiver.config import ReceiverConfig
from sla_server.events.receiver.handler import Accept, PostHandler, PostLimits
from sla_server.events.receiver.listener import EventListener, ListenerFiles, server_context
from sla_server.events.recipients.secret_files import read_secret

log = structlog.get_logger("receiver")
END_S: Final = 5.0


def at_once(_items: Sequence[QueuedEvent]) -> bool:
    """A post is confirmed when its events are on disk."""
    return True


class EventReceiver:
    """See the module.

    Args:
        setting: key of the address in the configuration, for errors.
        config: of it.
        secrets_dir: holds the files of secrets. base: where relative paths of certificates begin.
        accept: makes notices durable.
        confirmed: see ``PostHandler``.
        clock: both time bases.

    Raises:
        ConfigError: the address is taken, or the certificate cannot be used.
    """

    def __init__(
        self,
        setting: str,
        config: ReceiverConfig,
        secrets_dir: Path,
        base: Path,
        accept: Accept,
        clock: Clock,
        confirmed: Callable[[Sequence[QueuedEvent]], bool] = at_once,
    ) -> None:
        limits = PostLimits(config.max_body_bytes, config.requests_per_s)
        self._handler = PostHandler(secrets_of(config, secrets_dir), limits, accept, confirmed, clock)
        address = parse_address(config.listen)
        self._listener = EventListener(setting, address, self._handler, files_of(config, base))
        self._threads: ThreadGroup | None = None

    @property
    def port(self) -> int:
        """That is listened on."""
        return self._listener.port

    @property
    def has_failed(self) -> bool:
        """Whether a thread has died."""
        return self._threads is not None and self._threads.failed is not None

    def start(self, stop: Stop) -> None:
        """Take posts until the stop."""
        self._threads = ThreadGroup(lambda name, exc: stop.set(f"thread {name} died: {exc}"))
        self._listener.start(self._threads, stop)
        log.info("receiving", port=self.port)

    def join(self) -> None:
        """After the stop: let posts under way end; one that does not gets no answer."""
        if self._threads is not None:
            try:
                self._threads.join(END_S)
            except ThreadDidNotStop as exc:
                log.warning("posts-hang", problem=str(exc))

    def close(self) -> None:
        """Close the listening socket."""
        self._listener.close()

    def figures(self) -> dict[str, Any]:
        """See ``PostHandler``."""
        return self._handler.figures()


def files_of(config: ReceiverConfig, base: Path) -> ListenerFiles | None:
    """The certificate, if there is one."""
    tls = config.tls
    if tls.cert_file is None or tls.key_file is None:
        return None
    return ListenerFiles(base / tls.cert_file, base / tls.key_file)


def secrets_of(config: ReceiverConfig, secrets_dir: Path) -> dict[str, Path]:
    """Name of each sender to the file of its secret."""
    return {each.name: secrets_dir / each.secret_file for each in config.sender}


def check_files(config: ReceiverConfig, secrets_dir: Path, base: Path) -> None:
    """Check what the configuration names.

    Raises:
        ConfigError, SecretUnusable: the certificate or a secret cannot be used.
    """
    if (files := files_of(config, base)) is not None:
        server_context(files)
    for path in secrets_of(config, secrets_dir).values():
        read_secret(path)
