"""Makes recipients from their documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from pmdaemon.errors import ConfigError
from sla_server.events.documents import RecipientSpec
from sla_server.events.recipients.alertmanager import Alertmanager
from sla_server.events.recipients.apprise_services import AppriseServices
from sla_server.events.recipients.base import Recipient
from sla_server.events.recipients.command import CommandRecipient
from sla_server.events.recipients.heartbeat import Heartbeat
from sla_server.events.recipients.inbox import Inbox, InboxStore
from sla_server.events.recipients.json_file import JsonFile
from sla_server.events.recipients.network import Resolver
from sla_server.events.recipients.smtp import Smtp
from sla_server.events.recipients.syslog import Syslog
from sla_server.events.recipients.webhook import HttpTarget, Webhook

TIMEOUTS_S: Final = {"command": 60.0, "apprise": 60.0, "smtp": 30.0}
TIMEOUT_S: Final = 10.0
"""Of the other kinds."""


class RecipientBuilder:
    """See the module; a ``base.Builder``.

    Args:
        secrets_dir: holds the files that documents name.
        commands_dir: holds the programs of kind command.
        files_dir: where recipients of kind file write.
        store: where recipients of kind inbox store.
        external_url: address of the page, for links.
    """

    def __init__(
        self,
        secrets_dir: Path,
        commands_dir: Path,
        files_dir: Path,
        store: InboxStore | None = None,
        external_url: str = "",
        resolver: Resolver | None = None,
    ) -> None:
        self._secrets_dir = secrets_dir
        self._commands_dir = commands_dir
        self._files_dir = files_dir
        self._store = store
        self._external_url = external_url
        self._resolver = resolver or Resolver()

    def __call__(self, name: str, spec: Mapping[str, Any]) -> Recipient:
        """Make a recipient of ``spec`` of its document; opens nothing yet.

        Raises:
            ConfigError: names the field, its value and what to do.
        """
        try:
            model = RecipientSpec.model_validate(spec)
        except ValidationError as exc:
            first = exc.errors(include_input=False, include_url=False)[0]  # a value might be a secret
            where = ".".join(map(str, first["loc"]))
            problem = f"{where}: {first['msg']}" if where else first["msg"]
            fix = "Correct its document and apply it again"
            raise ConfigError(f"recipient {name}", problem, fix) from None
        limits: dict[str, Any] = {
            "timeout_s": TIMEOUTS_S.get(model.kind, TIMEOUT_S)
            if model.timeout is None
            else float(model.timeout),
            "most_notices": model.batch,
        }
        if model.webhook is not None:
            target = self._target(model.webhook)
            return Webhook(name, model.webhook, target, external_url=self._external_url, **limits)
        if model.alertmanager is not None:
            return Alertmanager(name, model.alertmanager, self._target(model.alertmanager), **limits)
        if model.heartbeat is not None:
            return Heartbeat(name, model.heartbeat, self._target(model.heartbeat), **limits)
        if model.smtp is not None:
            return Smtp(name, model.smtp, self._secrets_dir, self._resolver, **limits)
        if model.syslog is not None:
            return Syslog(name, model.syslog, self._secrets_dir, self._resolver, **limits)
        if model.file is not None:
            return JsonFile(name, model.file, self._files_dir, **limits)
        if model.command is not None:
            return CommandRecipient(name, model.command, self._commands_dir, **limits)
        if model.apprise is not None:
            return AppriseServices(name, model.apprise, self._secrets_dir, **limits)
        return Inbox(name, self._store, **limits)

    def _target(self, spec: Any) -> HttpTarget:
        return HttpTarget(spec, self._secrets_dir, self._resolver)
