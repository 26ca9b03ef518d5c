"""``sla support bundle``: one file with what those who help need to see, and nothing that is secret.

The file is a tar.gz of small texts: releases, the configuration with its secrets masked, what the API says of
the server (health, processes, live view, metrics, events, episodes, sizes of tables), sizes of the files on
the disk, the ends of the logs. It is made while the server is down as well: what cannot be had is named in
``manifest.json`` with the reason.

Three things keep secrets out. Only what is listed here is gathered: no file of the data directory but its
log, no key, no file with a recipient's secret. What is gathered passes ``Scrubber``, which removes every
secret that this machine knows (the API's token, those of the configuration and of the environment, the
contents of ``notify.secrets_dir``) wherever it occurs, and whatever has the form of one. And the file is
closed to other users. It does have names: of agreements, volumes, gateways, clients, and addresses of hosts.

Bounds: ``PART_BYTES`` a part (of logs the end, of others the beginning), ``--limit`` seconds in all. The file
appears whole or not at all, and never replaces one.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import click

from pmdaemon.errors import SlaError
from pmdaemon.runtime import config as files
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.config import masked
from pmdaemon.runtime.failures import failures
from sla_server import config as configuration
from sla_server import directories
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, RequestRefused, ServerDown
from sla_server.cli.formatting import CONFIG, FiniteRange, pass_client
from sla_server.events.recipients.secret_files import secrets_of_address

PART_BYTES: Final = 4 << 20
LOG_LINES: Final = 20_000
JOURNAL_S: Final = 15.0
UNITS: Final = ("sla-server", "gateway-agent", "sla-policy", "sla-rollup", "sla-job@*", "sla-relay")
MOST_FILES: Final = 20_000
SECRET_BYTES: Final = 64 << 10  # a file of notify.secrets_dir is a key or a password
LEAST_SECRET: Final = 6  # characters; shorter ones would remove parts of words
REMOVED: Final = "[removed]"
API_PARTS: Final = {
    "health.json": "/health",
    "ready.json": "/ready",
    "processes.json": "/processes",
    "sizes.json": "/sizes",
    "totals.json": "/totals",
    "mode.json": "/mode",
    "live.json": "/live",
    "backends.json": "/backends",
    "gateways.json": "/gateways",
    "slas.json": "/slas?limit=1000",
    "episodes.json": "/episodes?limit=200",
    "throttles.json": "/throttles?limit=200",
    "events.json": "/events?limit=500",
    "undelivered.json": "/undelivered",
    "policies.json": "/policies?limit=20",
    "jobs.json": "/jobs?limit=50",
}
"""Part -> what it asks the API."""
_NAMES: Final = (
    "password|passwd|passphrase|pwd|secret|token|credentials?|api[_-]?key|access[_-]?key|private[_-]?key"
)
_SECRET_KEY: Final = re.compile(rf"(?i)(?:{_NAMES}|(?:^|[_-])key)$")
_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\A[A-Za-z0-9+/=\s]*-----END [A-Z ]*PRIVATE KEY-----",  # a log may begin within one
    re.DOTALL,
)
_ASSIGNED: Final = re.compile(
    rf"""(?ix)
    (\b\w*(?:{_NAMES}|[a-z0-9][_-]key) (?:\\*["'])? \s* [=:] \s*)
    ( "(?:\\.|[^"\\\n])*(?:"|(?=\n|\Z))
    | '(?:\\.|[^'\\\n])*(?:'|(?=\n|\Z))
    | \\+["'](?:(?!\\+["'])[^\n])*(?:\\+["']|(?=\n|\Z))  # JSON in a text of JSON
    | [^\s"'\\,;{{}}\[\]][^\s"'\\]*?(?=[,;{{}}\[\]]*(?:[\s"'\\]|\Z))
    )"""
)
_PLAIN: Final = re.compile(r"null|true|false|nil|None|-?[\d.]+|\[removed\]|\*\*\*.*")
_QUOTE: Final = re.compile(r"\\*[\"']")
_OPTION: Final = re.compile(rf"(?i)(?<!\S)(--[\w-]*(?:{_NAMES})\s+)[^\s\"'\\]+")
_HEADER: Final = re.compile(
    r"(?i)\b((?:(?:proxy-)?authorization|(?:set-)?cookie)\\*[\"']?\s*[:=]\s*\\*[\"']?"
    r"(?:(?:bearer|basic)\s+)?)"
    r"[^\s\"'\\][^\n\"'\\]*"
)
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_SIGNED: Final = re.compile(r"\beyJ[\w-]{6,}\.[\w-]+\.[\w-]*")
_CODE: Final = re.compile(r"([?&]code=)[^&\s\"']+")
_ADDRESS: Final = re.compile(r"[A-Za-z][\w+.-]*://[^\s\"'<>\\]+")


def _without_value(found: re.Match[str]) -> str:
    """``name = value`` without the value; quotes stay, so that JSON stays JSON."""
    name, value = found.groups()
    if _PLAIN.fullmatch(value):
        return found.group()
    opened = _QUOTE.match(value)
    quote = opened.group() if opened is not None else ""
    return f"{name}{quote}{REMOVED}{quote}"


class Scrubber:
    """Removes secrets from texts: those that are known, and what has the form of one."""

    def __init__(self, known: Iterable[str]) -> None:
        secrets = {text for each in known for text in (each, each.strip()) if len(text) >= LEAST_SECRET}
        escaped = {json.dumps(text)[1:-1] for text in secrets}  # as they are written in JSON
        longest_first = sorted(secrets | escaped, key=lambda text: (-len(text), text))
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        """The same without secrets."""
        text = _PRIVATE_KEY.sub(REMOVED, text)
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        return "".join(self._line(line) for line in text.splitlines(keepends=True))

    def value(self, value: Any, *, is_secret: bool = False) -> Any:
        """A JSON value without those of keys whose names say that they hold a secret."""
        if isinstance(value, Mapping):
            return {
                key: self.value(each, is_secret=is_secret or _SECRET_KEY.search(str(key)) is not None)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(each, is_secret=is_secret) for each in value]
        return REMOVED if is_secret and value and isinstance(value, str) else value

    @staticmethod
    def _line(line: str) -> str:
        line = _OPTION.sub(rf"\1{REMOVED}", _HEADER.sub(rf"\1{REMOVED}", masked(line)))
        line = _SIGNED.sub(REMOVED, _BEARER.sub(rf"\1 {REMOVED}", line))
        return _ASSIGNED.sub(_without_value, _CODE.sub(rf"\1{REMOVED}", line))


class Bundle:
    """The parts gathered so far, scrubbed and bounded."""

    def __init__(self, scrubber: Scrubber, deadline: Deadline) -> None:
        self._scrubber = scrubber
        self._deadline = deadline
        self.parts: dict[str, bytes] = {}
        self.missing: dict[str, str] = {}

    def add(self, name: str, gather: Callable[[], Any], *, keep_end: bool = False) -> Exception | None:
        """Gather one part: text, or a value for JSON.

        Returns:
            Why it could not be gathered, which is noted; the other parts come all the same.
        """
        if self._deadline.passed:
            self.missing[name] = "the time was up"
            return None
        try:
            found = gather()
        except (SlaError, OSError, ValueError, subprocess.SubprocessError) as exc:
            self.missing[name] = self._scrubber.text(str(exc) or type(exc).__name__)
            return exc
        if not isinstance(found, str):
            found = json.dumps(self._scrubber.value(found), indent=1, default=str, ensure_ascii=False) + "\n"
        data = self._scrubber.text(found).encode("utf-8", "replace")
        if (left_out := len(data) - PART_BYTES) > 0:
            self.missing[name] = f"{left_out} bytes of its {'beginning' if keep_end else 'end'}"
            data = data[-PART_BYTES:] if keep_end else data[:PART_BYTES]
        self.parts[name] = data
        return None

    def write(self, path: Path) -> None:
        """Write the file, closed to others; the manifest is its first part.

        Raises:
            BadUsage: there is such a file.
            OSError: it cannot be written; nothing is left.
        """
        sizes = {name: len(data) for name, data in sorted(self.parts.items())}
        made = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = {"made": made, "parts": sizes, "missing": self.missing}
        whole = {"manifest.json": (json.dumps(manifest, indent=1) + "\n").encode(), **self.parts}
        folder = path.name.removesuffix(".tar.gz")
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
                for name, data in whole.items():
                    member = tarfile.TarInfo(f"{folder}/{name}")
                    member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
                    tar.addfile(member, io.BytesIO(data))
            try:
                os.link(aside, path)  # fails where there is one, unlike a rename
            except FileExistsError as exc:
                raise BadUsage(f"{path} exists; choose another name with --output") from exc
        finally:
            aside.unlink(missing_ok=True)


@click.group(cls=Commands)
def support() -> None:
    """Gather what those who help need to see."""


@support.command()
@CONFIG
@click.option(
    "--output",
    "-O",
    "path",
    type=click.Path(path_type=Path),
    help="The file [./sla-support-HOST-TIME.tar.gz].",
)
@click.option(
    "--limit",
    "limit_s",
    type=FiniteRange(1, 3600),
    default=60.0,
    show_default=True,
    help="Seconds it may take.",
)
@pass_client
def bundle(client: Client, config: Path | None, path: Path | None, limit_s: float) -> None:
    """Make one tar.gz: releases, configuration, state, metrics, logs and sizes, without secrets.

    It has names of agreements, volumes, gateways and clients, and addresses of hosts; look into it before you
    hand it on.
    """
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = path or Path(f"sla-support-{platform.node() or 'host'}-{when}.tar.gz")
    if path.exists():
        raise BadUsage(f"{path} exists; choose another name with --output")
    made = gathered(client, config or client.config, Deadline(limit_s))
    made.write(path)
    size = path.stat().st_size
    click.echo(f"{path}: {len(made.parts)} parts, {size / 1024:.0f} KiB, without secrets; names are in it")
    for name, reason in made.missing.items():
        click.echo(f"  not in it: {name} ({reason.splitlines()[0]})", err=True)


def gathered(client: Client, path: Path | None, deadline: Deadline) -> Bundle:
    """All parts.

    Args:
        client: of the server, which may be down.
        path: its configuration on this machine, if it has one here.
        deadline: when to leave out what is still to come.
    """
    trouble = ""
    loaded = None
    try:
        loaded = configuration.load(path)
    except SlaError as exc:
        trouble = str(exc)
    made = Bundle(Scrubber(_secrets(client, loaded)), deadline)
    made.add("about.json", _about)
    if loaded is None:
        made.missing["config.toml"] = masked(trouble)
    else:
        found = loaded
        made.add("config.toml", lambda: files.show(found))
        made.add("server.json", lambda: _server(found))
        made.add("files.json", lambda: _sizes_of(deadline, found.data_dir, found.runtime_dir))
    _add_answers(made, client)
    if loaded is not None:
        log_path = loaded.data_dir / "server.log"
        made.add("logs/server.log", lambda: _end_of(log_path), keep_end=True)
    for unit in UNITS:
        _add_journal(made, unit, deadline)
    return made


def _add_answers(made: Bundle, client: Client) -> None:
    """What the API says; where no process answers it is asked once."""
    left = {"metrics.prom": "/metrics", **API_PARTS}
    while left:
        name = next(iter(left))
        failed = made.add(name, partial(_answer, client, left.pop(name)))
        if isinstance(failed, ServerDown):
            made.missing.update(dict.fromkeys(left, "no server answers"))
            return


def _answer(client: Client, asked: str) -> Any:
    """An answer; of a server that is down the problem, which says why."""
    if asked == "/metrics":
        return client.text(asked)
    try:
        return client.get(asked)
    except RequestRefused as exc:
        return exc.problem


def _secrets(client: Client, loaded: configuration.ResolvedConfig | None) -> Iterator[str]:
    """Every secret that this machine knows; what cannot be read cannot be gathered either."""
    for name, text in os.environ.items():
        if name.startswith(("SLA", "PG", "AWS")):
            yield from _secrets_of(text, name)
    with suppress(OSError, SlaError):
        yield client.token_path().read_text(errors="replace")
    if loaded is None:
        return
    with suppress(OSError):
        yield loaded.api.token_path(loaded.data_dir).read_text(errors="replace")
    if (client_secret := loaded.api.oidc.client_secret_file) is not None:
        with suppress(OSError):
            yield client_secret.read_text(errors="replace")
    yield from _secrets_of(loaded.model_dump(mode="json"), "")
    folder = loaded.data_dir / loaded.notify.secrets_dir
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            with suppress(OSError):
                if path.is_file():
                    with path.open(errors="replace") as file:
                        text = file.read(SECRET_BYTES)
                    yield text
                    for line in text.splitlines():
                        yield line
                        if "://" in line:
                            yield from secrets_of_address(line.strip())


def _secrets_of(value: Any, key: str) -> Iterator[str]:
    """Secrets in a value: those whose key says so, and passwords and parameters of addresses."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _secrets_of(each, str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _secrets_of(each, key)
    elif isinstance(value, str):
        if _SECRET_KEY.search(key):
            yield value
        for found in _ADDRESS.finditer(value):
            with suppress(ValueError):
                parts = urlsplit(found.group())
                fields = (each.partition("=") for each in re.split("[&;]", parts.query))
                named = [text for name, _, text in fields if _SECRET_KEY.search(name)]
                for text in (parts.password or "", *named):
                    yield from (text, unquote(text))


def _about() -> dict[str, Any]:
    load = os.getloadavg()
    return {
        "release": version("storage-sla-server"),
        "python": sys.version,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "load": load,
        "memory": _memory(),
        "user_id": os.geteuid(),
        "environment": sorted(name for name in os.environ if name.startswith(("SLA", "PG"))),
        "packages": {found.metadata["Name"]: found.version for found in distributions()},
    }


def _memory() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    wanted = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    found = {name: rest for name, _, rest in (line.partition(":") for line in lines) if name in wanted}
    return {name: int(rest.split()[0]) << 10 for name, rest in found.items()}


def _server(loaded: configuration.ResolvedConfig) -> dict[str, Any]:
    folders = (loaded.data_dir, loaded.runtime_dir)
    return {
        "supervisor_pid": directories.running_pid(loaded.data_dir),
        "failures": failures(loaded.runtime_dir),
        "disks": {str(folder): _disk(folder) for folder in folders if folder.exists()},
    }


def _disk(folder: Path) -> dict[str, int]:
    usage = shutil.disk_usage(folder)
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def _sizes_of(deadline: Deadline, *folders: Path) -> dict[str, Any]:
    """Folder -> its files with sizes, or how many they are; queues and mailboxes are among them."""
    found: dict[str, Any] = {}
    seen = 0
    for top in folders:
        for folder, _folders, names in os.walk(top):
            entries: dict[str, int] = {}
            for name in sorted(names)[: MOST_FILES - seen]:
                with suppress(OSError):
                    entries[name] = os.lstat(Path(folder, name)).st_size
            seen += len(names)
            total = {"files": len(names), "bytes": sum(entries.values())}
            found[folder] = {**total, "sizes": entries} if len(entries) <= 100 else total
            if seen >= MOST_FILES or deadline.passed:
                return {**found, "has_more": True}
    return found


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        if (begin := path.stat().st_size - 2 * PART_BYTES) > 0:
            file.seek(begin)
            file.readline()  # half of a secret would not be known as one
        return file.read(2 * PART_BYTES).decode(errors="replace")


def _add_journal(made: Bundle, unit: str, deadline: Deadline) -> None:
    """The unit's lines in the journal of systemd, if there are any on this machine."""
    if not shutil.which("journalctl"):
        return
    command = ["journalctl", "--no-pager", "--quiet", "-o", "short-iso"]
    command += ["-n", str(LOG_LINES), "-u", f"{unit}.service"]

    def read() -> str:
        limit_s = max(0.1, min(JOURNAL_S, deadline.left_s()))
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        ).stdout

    name = f"logs/{unit.removesuffix('@*')}.journal"
    made.add(name, read, keep_end=True)
    if not made.parts.get(name, b"-"):
        del made.parts[name]
