"""Files that README and the operations pages tell a newcomer to write are accepted unchanged."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_agent.config import AgentConfig
from pmdaemon.runtime.config import load
from sla_server.agreements.load import load_documents
from sla_server.services import catalog as catalogs
from sla_server.simulate.setup import read_directory
from tests.support.cli import Terminal
from tests.support.paths import ROOT


def example(page: str, language: str) -> str:
    """The first block of that language in a page."""
    found = re.search(rf"^ *```{language}\n(.*?)^ *```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no {language} block"
    return textwrap.dedent(found[1])


def indented(page: str) -> Iterator[str]:
    """The indented blocks of a page."""
    for found in re.finditer(r"(?:^    .*\n|^\n(?=    ))+", (ROOT / page).read_text(), re.MULTILINE):
        yield textwrap.dedent(found[0]).strip("\n") + "\n"


@pytest.mark.parametrize("page", ["README.md", "docs/operations/agent.md"])
def test_the_agents_file(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.toml").write_text(example(page, "toml"))
    config = load(AgentConfig, Path("agent.toml"), environment={})
    assert [export.volume for export in config.export] == ["vol-17"]
    assert config.state_dir.is_absolute()


def test_the_agreement() -> None:
    (loaded,) = load_documents(example("README.md", "yaml"), 60)
    assert loaded.agreement.metadata.name == "erp-gold"


def test_the_simulation_file(tmp_path: Path) -> None:
    (tmp_path / "simulation.yaml").write_text(example("docs/operations/simulate.md", "yaml"))
    (tmp_path / "gold.yaml").write_text(example("README.md", "yaml"))
    folder = read_directory(tmp_path)
    contract, setup = folder.contract(()), folder.setup
    assert [promise.key for promise in contract.promises] == [("erp-gold", "latency")]
    assert [load.volume for load in setup.loads] == ["gold", "big"]


def test_the_documents_about_delivery() -> None:
    """Applied one after the other, as a reader of the page does."""
    catalog, kinds = catalogs.Catalog(), list[str]()
    for text in indented("docs/operations/recipients.md"):
        if text.startswith("apiVersion:"):
            change = catalogs.apply(catalog, load_documents(text, 60), "ann", 1_800_000_000_000_000)
            catalog = change.catalog
            assert change.warnings == []
            kinds += [row["kind"] for row in change.applied]
    assert kinds == ["Recipient", "Recipient", "Route", "Silence"]


def test_the_patterns_of_a_match() -> None:
    page = (ROOT / "docs/operations/recipients.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| `(\[.*\])` \|$", page, re.MULTILINE))
    assert list(rows) == ["kinds", "elements", "subjects", "agreements", "gateways", "volumes"]
    match = ", ".join(f"{key}: {patterns}" for key, patterns in rows.items())
    spec = f"{{recipients: [mail], match: {{{match}}}}}"
    assert load_documents(
        f"apiVersion: storage-sla/v1\nkind: Route\nmetadata: {{name: a}}\nspec: {spec}\n", 60
    )


def test_the_commands_about_delivery(sla: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sla.mailbox.answer = lambda _header: (True, 200, {"event_id": "e0001"})
    commands, event, *_ = indented("docs/operations/notify.md")
    Path("event.json").write_text(event)
    for line in commands.splitlines():
        name, *words = shlex.split(line.replace(" ID ", " e0001 "), comments=True)
        done = sla(*words)
        assert (name, done.exit_code in (0, 75)) == ("sla", True), f"{line}: {done.output}"
    assert "goes to mail: route all" in sla("notify", "route", "--event", "event.json").output
