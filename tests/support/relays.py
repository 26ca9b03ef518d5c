"""A relay and the delivery of a server as processes, the one before the other, in one folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pmdaemon.reserve.raising import EventRaiser
from sla_server.agreements.load import load_documents
from sla_server.events.routing import NotificationInForce, RoutingFile, RoutingTable
from tests.support.deliveries import event
from tests.support.stage import free_port

LIMIT_S = 180.0
SECRET = "shared"
UPSTREAM = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: relay}}
spec: {{webhook: {{url: "{url}", secret_file: relay.key}}, batch: {batch}, timeout: 50s}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: all}}
spec: {{recipients: [relay], match: {{elements: [gateway]}}}}
"""
RECIPIENT = "apiVersion: storage-sla/v1\nkind: Recipient\nmetadata: {{name: {}}}\nspec: {}\n"
ROUTE = (
    "apiVersion: storage-sla/v1\nkind: Route\nmetadata: {{name: to-{0}}}\n"
    "spec: {{recipients: [{0}], match: {1}}}\n"
)


def documents(**recipients: tuple[str, str]) -> str:
    """Name to (spec, match)."""
    parts = []
    for name, (spec, match) in recipients.items():
        parts += [RECIPIENT.format(name, spec), ROUTE.format(name, match)]
    return "---\n".join(parts)


class Chain:
    """The processes of both sites. Use as a context manager.

    Attributes:
        raised: identities of the events that the server's side has accepted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site, self.server = folder / "site", folder / "server"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/events/site-a"
        self.data, self.run = self.site / "data", self.site / "run"
        self.raised: list[str] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._raiser: EventRaiser | None = None
        for each in (
            self.data / "secrets",
            self.server / "data" / "secrets",
            self.server / "data" / "events" / "reserve",
        ):
            each.mkdir(parents=True)
            for path in (each, *each.parents):
                if folder in path.parents:
                    path.chmod(0o700)
        for key in (self.data / "secrets" / "site-a.key", self.server / "data" / "secrets" / "relay.key"):
            key.write_text(SECRET)
            key.chmod(0o600)

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_exc: object) -> None:
        for name in list(self._processes):
            self.kill(name)
        if self._raiser is not None:
            self._raiser.close()

    def configure(self, text: str, **keys: Any) -> None:
        """Write the relay's file and its documents; ``keys`` go to the top of the file."""
        values = {
            "data_dir": str(self.data),
            "runtime_dir": str(self.run),
            "listen": f"127.0.0.1:{self.port}",
            **keys,
        }
        top = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        (self.site / "relay.toml").write_text(
            f'{top}[[sender]]\nname = "site-a"\nsecret_file = "site-a.key"\n'
            "[events]\nretry_first_s = 0.05\nretry_max_s = 0.2\npoll_interval_s = 0.02\n"
        )
        (self.site / "documents.yaml").write_text(text)

    def start_relay(self) -> None:
        """Start it and wait until it listens."""
        (self.run / "relay.port").unlink(missing_ok=True)
        self.start("relay", "sla_server", "relay", "--config", str(self.site))
        self.wait((self.run / "relay.port").exists, "the relay's port")

    def start_server(self, batch: int = 3, text: str = "", tables: str = "") -> None:
        """Start the server's delivery, with the relay as its recipient; ``text``: documents instead of it."""
        data = self.server / "data"
        config = self.server / "server.toml"
        config.write_text(
            f'data_dir = "{data}"\nruntime_dir = "{self.server / "run"}"\n'
            "[events]\nretry_first_s = 0.05\nretry_max_s = 0.2\npoll_interval_s = 0.02\n" + tables
        )
        text = text or UPSTREAM.format(url=self.url, batch=batch)
        held = [NotificationInForce(each.document, 1, 0) for each in load_documents(text, 60)]
        assert RoutingFile(data).publish(RoutingTable.of(held, {}))
        (self.server / "run").mkdir(mode=0o700, exist_ok=True)
        self.start("server", "sla_server.process", "delivery", "--config", str(config))
        self.wait(lambda: self.server_state("recipients"), "the server's delivery")
        if self._raiser is None:
            self._raiser = EventRaiser(data / "events" / "reserve", "raiser")
            self._raiser.initialized()

    def raise_some(self, count: int, **fields: Any) -> None:
        """Events as any process of the server raises them."""
        assert self._raiser is not None
        for _ in range(count):
            row = event(len(self.raised) + 1, **fields).row()
            assert self._raiser.record(row) is not None
            self.raised.append(row["event_id"])

    def start(self, name: str, *command: str) -> None:
        """Start ``python -m COMMAND``; its log is NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as output:
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment, cwd=self.folder,
            )  # fmt: skip

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Kill a process and reap it; its exit status."""
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        return process.wait(LIMIT_S)

    def wait(self, is_true: Callable[[], object], what: str) -> None:
        """Until it is, or the limit."""
        deadline = time.monotonic() + LIMIT_S
        while not is_true():
            assert time.monotonic() < deadline, f"{what} did not come: {self.logs()}"
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} has ended: {self.logs()}"
            time.sleep(0.02)

    def logs(self) -> str:
        """The end of each log."""
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log")
        )

    def lines(self, name: str) -> list[str]:
        """Identities in the file of a recipient, without those of the relay's own events."""
        return [each["delivery_id"] for each in self.notices(name) if each["event"]["source"] == "raiser"]

    def notices(self, name: str) -> list[dict[str, Any]]:
        """What a recipient of kind file got."""
        path = self.data / "notices" / f"{name}.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

    def server_state(self, key: str) -> list[dict[str, Any]]:
        """Rows of the server's state of delivery."""
        return list(read(self.server / "run" / "metrics" / "delivery.json").get(key, []))

    def confirmed_there(self) -> int:
        """Notices that the server knows to be confirmed by the relay, since its start."""
        return sum(row["confirmed"] for row in self.server_state("recipients") if row["name"] == "relay")

    def state(self, file: str = "delivery") -> dict[str, Any]:
        """What the relay reports of itself."""
        return read(self.run / "metrics" / f"{file}.json")

    def status(self, *options: str) -> subprocess.CompletedProcess[str]:
        """``sla-server relay status``."""
        return subprocess.run(
            [sys.executable, "-m", "sla_server", "relay", "status", "--config", str(self.site), *options],
            capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """A state file; empty while there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def without_repeats(identities: Sequence[str]) -> list[str]:
    """The first of each, in order."""
    return list(dict.fromkeys(identities))
