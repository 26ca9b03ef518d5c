from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's segment goes; pytest makes the directory private."""
    return tmp_path / "main"
