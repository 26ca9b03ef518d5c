"""Manual pages: groff, which Debian brings along with man, has nothing to say about any of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from docs import man


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff; test_generated checks the requests")
def test_groff_has_no_warning() -> None:
    pages = sorted(man.FOLDER.glob("*.1"))
    assert len(pages) > 30
    command = ["groff", "-man", "-Tutf8", "-ww", "-z", *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
