"""Files that README and the operations pages tell a newcomer to write are accepted unchanged."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from gateway_agent.config import AgentConfig
from pmdaemon.runtime.config import load
from sla_server.agreements.load import load_documents
from sla_server.simulate.setup import read_directory
from tests.support.paths import ROOT


def example(page: str, language: str) -> str:
    """The first block of that language in a page."""
    found = re.search(rf"^ *```{language}\n(.*?)^ *```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no {language} block"
    return textwrap.dedent(found[1])


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
    contract, setup = read_directory(tmp_path)
    assert [promise.key for promise in contract.promises] == [("erp-gold", "latency")]
    assert [load.volume for load in setup.loads] == ["gold", "big"]
