"""Slack, Teams, PagerDuty, chat and telephone services: whatever the package apprise knows, by its addresses.

apprise is an optional dependency (``pip install storage-sla-server[notify]``) and is imported at the first
delivery. Its addresses hold the services' tokens, so the document names a file with one address a line.

apprise says success or not, without a reason, and has timeouts of its own for each read; the call runs in a
thread that is left behind at the deadline. While it runs no other one is begun. What it raises is raised by
``deliver``: the answer names the type alone, because the text may repeat a token.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import AppriseSpec
from sla_server.events.recipients import wording
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, Status, retry
from sla_server.events.recipients.http_client import MENDED_AFTER_S
from sla_server.events.recipients.secret_files import SecretUnusable, read_secret

TYPES: Final = {"info": "info", "warning": "warning", "critical": "failure"}


def _load() -> Any:
    return importlib.import_module("apprise")


class AppriseServices:
    """See the module."""

    kind = "apprise"

    def __init__(
        self,
        name: str,
        spec: AppriseSpec,
        secrets_dir: Path,
        *,
        timeout_s: float,
        most_notices: int,
        load: Callable[[], Any] = _load,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.most_notices = most_notices
        self._path = secrets_dir / spec.url_file
        self._load = load
        self._call: threading.Thread | None = None

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        if self._call is not None:
            self._call.join(deadline.left_s())
            if self._call.is_alive():
                return retry("the service has not answered the notices before")
        try:
            services = self._services(read_secret(self._path, may_have_lines=True))
        except ImportError:
            return retry("apprise is not installed: pip install storage-sla-server[notify]", MENDED_AFTER_S)
        except (SecretUnusable, ValueError) as exc:
            return retry(str(exc), MENDED_AFTER_S)
        found: list[bool | Exception] = []
        last = notices[-1]
        kind = "success" if last.status is Status.RESOLVED else TYPES[last.event.severity]

        def call() -> None:
            try:
                body, title = wording.text(notices), wording.title(notices)
                found.append(bool(services.notify(body=body, title=title, notify_type=kind)))
            except Exception as exc:  # noqa: BLE001 - raised below, in the recipient's thread
                found.append(exc)

        self._call = threading.Thread(target=call, name="apprise", daemon=True)
        self._call.start()
        self._call.join(deadline.left_s())
        if self._call.is_alive():
            return retry("no answer in time")
        if found and isinstance(found[0], Exception):
            raise found[0]
        return CONFIRMED if found == [True] else retry("the service refused it, or could not be reached")

    def close(self) -> None:
        """See ``Recipient``."""

    def _services(self, text: str) -> Any:
        services = self._load().Apprise()
        for number, line in enumerate(text.splitlines(), start=1):
            address = line.strip()
            if address and not address.startswith("#") and not services.add(address):
                raise ValueError(f"{self._path}, line {number}: apprise knows no such address")
        if not len(services):
            raise ValueError(f"{self._path} holds no address")
        return services
