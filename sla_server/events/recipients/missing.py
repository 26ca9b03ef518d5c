"""What a recipient needs and does not find yet: secret files, its program, a socket, an optional package.

Its document is in force all the same, since a file may come later; the answer to ``sla apply`` says what is
missing and where. Looks at files, so it may block: not in a thread that others wait for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sla_server.events.documents import RecipientSpec
from sla_server.events.recipients.config import NotifyDirectories
from sla_server.events.recipients.secret_files import SecretUnusable, read_address, read_secret


def missing(spec: RecipientSpec, directories: NotifyDirectories) -> Iterator[str]:
    """A text for each thing without which nothing is delivered: its field, where it should be, what to do."""
    yield from (f"{problem}; what is for it waits until then" for problem in _problems(spec, directories))


def _problems(spec: RecipientSpec, directories: NotifyDirectories) -> Iterator[str]:
    target = getattr(spec, spec.kind)
    for name in type(target).model_fields:
        value = getattr(target, name) if name.endswith("_file") else None
        if value is not None and (problem := _unusable(spec.kind, name, directories.secrets / value)):
            yield f"{spec.kind}.{name}: {problem}"
    if spec.command is not None:
        path = directories.commands / spec.command.argv[0]
        if problem := _not_runnable(path):
            yield f"command.argv: {path} {problem}"
    if spec.syslog is not None and spec.syslog.unix is not None and not Path(spec.syslog.unix).is_socket():
        yield f"syslog.unix: {spec.syslog.unix} is no socket yet"
    if spec.apprise is not None and find_spec("apprise") is None:
        yield "apprise is not installed: pip install storage-sla-server[notify]"


def _unusable(kind: str, field: str, path: Path) -> str:
    """Why a secret file cannot be used, as a delivery would say; "" if it can."""
    try:
        if field == "ca_file":
            path.read_bytes()
        elif field == "url_file" and kind != "apprise":
            read_address(path)
        else:
            read_secret(path, may_have_lines=kind == "apprise")
    except SecretUnusable as exc:
        return str(exc)
    except OSError as exc:
        return f"{path}: {str(exc.strerror).lower()}. Put the certificates there"
    return ""


def _not_runnable(path: Path) -> str:
    if not path.exists():
        return "is not there. Put the program there and make it executable (chmod 755)"
    if not path.is_file():
        return "is no file. Put the program there"
    return "" if os.access(path, os.X_OK) else f"is not executable. Run: chmod 755 {path}"
