"""The whole product on this machine, for tests that need it. Labels every test here ``e2e``."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from sla_server.db import migrate
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from tests.support import api
from tests.support.browser import Page, fresh_page, running
from tests.support.load import Load
from tests.support.planes import Processes
from tests.support.site import Site
from tests.support.stage import Agent, Stage

FINISH_S = 60.0  # for I/Os of a load that is stopped: a plane may stand still for some seconds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e" in str(item.path):
            item.add_marker("e2e")


@pytest.fixture(scope="session", autouse=True)
def _schema_made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each stage begins with a copy.

    In test_server_command, test_first_steps and test_wheel the server makes it, as a new server does.
    """
    config, folder = DatabaseConfig(), tmp_path_factory.mktemp("schema")
    engine = make_engine(config, folder)
    migrate.upgrade(engine)
    engine.dispose()
    Stage.schema_file = folder / "sla.db"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chrome]:
    """One Chromium for all tests of a file."""
    with running() as driver:
        yield driver


@pytest.fixture
def page(chromium: Chrome) -> Page:
    """Opens a page of a size in it, with a window and storage of its own."""
    return partial(fresh_page, chromium)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """The page over the API tests' rows and a feed that the test decides."""
    made = Site(api.data_dir(tmp_path))
    yield made
    made.close()
    made.mailbox.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """See ``whole_product``."""
    with whole_product(tmp_path_factory.mktemp("stage")) as running:
        yield running


@contextlib.contextmanager
def whole_product(folder: Path, extra_toml: str = "", database_toml: str = "") -> Iterator[Stage]:
    """Server, two agents before one modelled disk, both agreements applied, observe mode."""
    with Stage(folder, extra_toml=extra_toml, database_toml=database_toml) as running:
        running.start_disk()
        running.start_server()
        disk = running.disk_uri
        running.start_agent(Agent("gateway-a", {"erp-db": disk.format("erp-db")}))
        running.start_agent(Agent("gateway-b", {"batch": disk.format("batch")}))
        running.wait(running.gateways_up, "both gateways")
        running.sla("apply", "-f", str(running.folder / "agreements.yaml"))
        yield running


@contextlib.contextmanager
def one_gateway(folder: Path, extra_toml: str) -> Iterator[Stage]:
    """Server and one agent, which has more than its volume in a file."""
    (folder / "disk").write_bytes(bytes(1 << 20))
    with Stage(folder) as running:
        running.start_server()
        running.start_agent(Agent("gateway-a", {"erp-db": str(folder / "disk")}, extra_toml=extra_toml))
        running.wait(running.gateways_up, "the gateway")
        yield running


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Processes]:
    """A data plane and programs around it, for one test."""
    for tool in ("fio", "nbdkit", "nbdcopy", "nbdinfo"):
        assert shutil.which(tool), f"{tool} is missing: deploy/setup.sh test"
    with Processes(tmp_path) as processes:
        yield processes


class Driver:
    """Runs loads in a thread with an event loop of its own; each can be stopped by itself."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load")
        self._thread.start()
        self._running: list[tuple[Load, asyncio.Event, object]] = []

    def start(self, socket_path: Path, export: str, **how: float) -> Load:
        """Start a load; see ``tests.support.load.Load`` for ``how``."""
        how = {"finish_s": FINISH_S, **how}  # what the gateway counts must have been seen here, too
        load = Load(socket_path, export, seed=len(self._running) + 1, **how)  # type: ignore[arg-type]
        stop = asyncio.Event()
        future = asyncio.run_coroutine_threadsafe(load.run(stop), self._loop)
        self._running.append((load, stop, future))
        return load

    def stop(self, load: Load) -> None:
        """Stop one load and raise what went wrong in it."""
        for known, stop, future in self._running:
            if known is load and not future.done():  # type: ignore[attr-defined]
                self._loop.call_soon_threadsafe(stop.set)
                future.result(timeout=2 * FINISH_S)  # type: ignore[attr-defined]

    def has_ended(self, load: Load) -> bool:
        """Whether it has stopped, also by itself: its connection was closed."""
        return any(known is load and future.done() for known, _stop, future in self._running)  # type: ignore[attr-defined]

    def close_loads(self) -> None:
        """Stop every load, whatever went wrong in it."""
        for load, _stop, _future in self._running:
            with contextlib.suppress(Exception):
                self.stop(load)

    def close(self) -> None:
        """Stop everything."""
        self.close_loads()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def driver() -> Iterator[Driver]:
    running = Driver()
    yield running
    running.close()
