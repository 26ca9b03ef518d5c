"""Manual pages: groff, which Debian brings along with man, has nothing to say about any of them."""

from __future__ import annotations

import subprocess

from docs import man


def test_groff_has_no_warning() -> None:
    pages = sorted(man.FOLDER.glob("*.1"))
    assert len(pages) > 30
    command = ["groff", "-man", "-Tutf8", "-ww", "-z", *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
