"""What people and machines write: documents, OpenSLO (YAML), configurations (TOML), heads of backups (JSON).

A case is a right text in which characters, lines or values are changed. The oracle: it is accepted, or
refused with the one class of error that its reader promises, with a text that can be printed. What is
accepted holds what it says: a document survives JSON and its own stored text, OpenSLO becomes documents that
are accepted or refused likewise, a configuration can be shown as TOML, and the names in a backup's head are
plain file names.
"""

from __future__ import annotations

import json
import tempfile
import time
import tomllib
import warnings
from pathlib import Path
from random import Random
from typing import Final

from gateway_agent.config import AgentConfig
from pmdaemon.errors import ConfigError, SlaError
from pmdaemon.runtime import config as configuration
from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import load_documents
from sla_server.agreements.openslo import to_openslo
from sla_server.cli.openslo import document_text, read_openslo
from sla_server.config import ServerConfig
from sla_server.db.backup import read_head
from tests.fuzz import Counts
from tests.support.agreements import FULL, agreement, calendar_text, maintenance_text

OTHERS: Final = calendar_text() + "---\n" + maintenance_text()
OPENSLO: Final = document_text(to_openslo(agreement(FULL)).documents[0])
SECRET: Final = "hunter2"
SERVER: Final = f"""\
data_dir = "data"
runtime_dir = "run"
[pmdaemon]
listen = "127.0.0.1:7411"
interval_s = 1.0
max_pairs = 2
[[pmdaemon.gateway]]
address = "10.0.0.5:7412"
name = "host-5"
[api]
listen = "127.0.0.1:8411"
allowed_hosts = ["sla.example"]
[database]
url = "postgresql+psycopg://sla:{SECRET}@db/sla?password={SECRET}"
queue_bytes = 16777216
[database.files]
url = "s3://bucket/x?secret_key={SECRET}"
[policy]
master = "local[*]"
"""
AGENT: Final = """\
name = "host-1"
state_dir = "state"
runtime_dir = "run"
server = "127.0.0.1:7411"
spool_bytes = 4194304
[[plane]]
name = "nbd-0"
listen = ["tcp:127.0.0.1:10809"]
[[export]]
volume = "vol-1"
plane = "nbd-0"
backend = "pool-1"
upstream = "nbd+unix:///vol-1?socket=/run/x.sock"
"""
HEAD: Final = json.dumps(
    {
        "format": 1, "made_us": 1, "software": "0.1.0", "revision": "0001", "database": "sqlite", "files": 0,
        "bytes": 0, "sql_sha256": "0" * 64, "state": ["api.token", "x.json"],
    },
    indent=1,
)  # fmt: skip
TOKENS: Final = (
    "", " ", "   ", "\t", "\n", "\n---\n", "...", ":", "-", "- ", "{", "}", "[", "]", ",", "&a ", "*a",
    "!!python/x ", "!!bool ", "!!binary ", "<<: ", "|", ">", "'", '"', "#", "%", "@", "`", "null", "~",
    "true", "0", "-1", "1e400", ".inf", ".nan", "9" * 400, "0x10", "2026-02-30", "24:00", "99.5", "5ms",
    "\ufeff", "\0", "\x85", "é", "\u2028", "../", "/etc/passwd", "..", "[" * 60, "{a: " * 60, "= ",
    "[x]\n", '"""', "inf", "nan", "x" * 3000, "\U0001f600",
)  # fmt: skip


def run(seconds: float, seed: int) -> Counts:
    """See the package."""
    return cases(seed, end_s=time.monotonic() + seconds)


def cases(seed: int, *, end_s: float = 0.0, count: int | None = None) -> Counts:
    """Either ``count`` cases, or those that fit until ``end_s`` (monotonic)."""
    made = refused = 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        while made < count if count is not None else time.monotonic() < end_s:
            random = Random(f"{seed}/{made}")
            text, check = random.choice(
                (
                    (FULL, stored_documents),
                    (OTHERS, stored_documents),
                    (OPENSLO, imported),
                    (SERVER, server),
                    (AGENT, agent),
                    (HEAD, backup_head),
                )
            )
            changed = mutated(random, text)
            try:
                check(changed, Path(folder))
            except SlaError as exc:
                refused += 1
                if not str(exc).encode("utf-8", "replace").strip():
                    raise AssertionError(f"seed {seed} case {made}: refused without a text") from exc
            except Exception as exc:
                raise AssertionError(
                    f"seed {seed} case {made}: {type(exc).__name__}: {exc} for {changed!r:.3000}"
                ) from exc
            made += 1
    return Counts(made, refused)


def mutated(random: Random, text: str) -> str:
    """Some changes, of which most leave the text nearly right."""
    for _ in range(random.choice((0, 1, 1, 1, 2, 3, 8))):
        lines = text.split("\n")
        at = random.randrange(len(lines))
        how = random.randrange(9)
        if how == 0:
            del lines[at]
        elif how == 1:
            lines.insert(at, random.choice(lines))
        elif how == 2:
            lines[at] = random.choice(TOKENS) + lines[at]
        elif how == 3:
            lines = [" " * random.randrange(4) + line for line in lines]
        elif how == 4:
            head, mark, _old = lines[at].partition(random.choice((":", "=", "[", ",")))
            lines[at] = head + mark + " " + random.choice(TOKENS)
        elif how == 5:
            lines = lines[:at]
        else:
            line = lines[at]
            where = random.randrange(len(line) + 1)
            end = min(len(line), where + random.randrange(4))
            lines[at] = line[:where] + random.choice(TOKENS) + line[end:]
        text = "\n".join(lines)
    return text


def stored_documents(text: str, _folder: Path) -> None:
    """Accepted: JSON and the stored text say the same again."""
    try:
        loaded = load_documents(text, 60)
    except AgreementsRefused as exc:
        _worded(exc)
        raise
    for item in loaded:
        document = item.document
        spec = json.loads(json.dumps(document.spec_json(), allow_nan=False))
        assert type(document).from_json(spec) == document, "JSON says something else"
        (again,) = load_documents(item.text, 60)
        assert again.document == document, "the stored text says something else"


def imported(text: str, folder: Path) -> None:
    """Accepted: what it becomes can be written, and is a document or refused as one."""
    path = folder / "openslo.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for document in read_openslo(str(path)).documents:
        stored_documents(document_text(document), folder)


def _worded(refused: AgreementsRefused) -> None:
    assert refused.problems, "refused without a problem"
    for problem in refused.problems:
        assert problem.problem, problem
        assert len(str(problem)) < 2000, "a problem repeats a whole document"
        json.dumps(problem.as_dict(), allow_nan=False)


def server(text: str, folder: Path) -> None:
    """Accepted: shown, and read again, without a secret."""
    _configuration(ServerConfig, text, folder)


def agent(text: str, folder: Path) -> None:
    """The same for the agent's file."""
    _configuration(AgentConfig, text, folder)


def _configuration(model: type[ServerConfig] | type[AgentConfig], text: str, folder: Path) -> None:
    path = folder / "file.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found = configuration.load(model, path, environment={})
    except ConfigError as exc:
        if str(path) not in str(exc):
            raise AssertionError(f"{exc} does not name the file") from exc
        raise
    tomllib.loads(configuration.show(found))


def backup_head(text: str, folder: Path) -> None:
    """Accepted: its names are names."""
    (folder / "backup.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    for name in read_head(folder).state:
        assert Path(name).name == name, f"{name!r} leaves the directory"
