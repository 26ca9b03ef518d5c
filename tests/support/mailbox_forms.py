from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import mailbox

IN_BOTH_FORMS = (
    "test_mailbox",
    "test_batch",
    "test_bundle",
    "test_writer",
    "test_races",
    "test_model",
    "test_crash",
    "test_processes",
    "test_rooms",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """These modules hold for the forms `lanes` and `shared` alike."""
    if metafunc.module.__name__.rpartition(".")[2] in IN_BOTH_FORMS:
        metafunc.parametrize("form", ["lanes", "shared"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)  # else a test with parameters of its own would run without it
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    mailbox.FORM = getattr(request, "param", "lanes")
    yield mailbox.FORM
    mailbox.FORM = "lanes"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's segment goes; pytest makes the directory private."""
    return tmp_path / "main"
