"""PDF by the real library: A4, the same file for the same report, nothing fetched, a clear refusal."""

from __future__ import annotations

import re
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import pytest

from sla_server.reports.compute import compute_report
from sla_server.reports.errors import PdfNotAvailable
from sla_server.reports.html import as_html
from sla_server.reports.inputs import read_inputs
from sla_server.reports.pdf import as_pdf
from tests.support.cli import Terminal
from tests.support.cli import sla as sla
from tests.support.reports import example_month

A4 = (595, 842)  # points


@pytest.fixture(scope="module")
def page() -> str:
    rows, now = example_month()
    return as_html(compute_report(read_inputs(rows, "erp-gold", "2026-10", now)))  # type: ignore[arg-type]


def unpacked(document: bytes) -> bytes:
    """The document with what its compressed streams hold."""
    found = [document]
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", document, re.DOTALL):
        with suppress(zlib.error):
            found.append(zlib.decompress(stream))
    return b"\n".join(found)


def test_pages_are_a4_and_the_same_report_is_the_same_file(page: str) -> None:
    made = as_pdf(page)
    assert made.startswith(b"%PDF-")
    assert as_pdf(page) == made
    boxes = re.findall(rb"/MediaBox \[0 0 ([0-9.]+) ([0-9.]+)\]", unpacked(made))
    sizes = {(round(float(width)), round(float(height))) for width, height in boxes}
    assert sizes == {A4}
    assert 2 <= len(boxes) <= 4


def test_it_fetches_nothing(page: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    evil = page.replace("<body>", f'<body><img src="{secret.as_uri()}"><img src="http://127.0.0.1:9/x">')
    assert as_pdf(evil).startswith(b"%PDF-")
    embedded = page.replace("<body>", f'<body><a rel="attachment" href="{secret.as_uri()}">x</a>')
    assert b"EmbeddedFile" not in unpacked(as_pdf(embedded))


def test_without_the_library_the_refusal_says_what_to_install(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    with pytest.raises(PdfNotAvailable, match=r"storage-sla-server\[reports\].*use -o html"):
        as_pdf(page)


def test_the_command_writes_one(sla: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "r.pdf"
    done = sla("report", "erp-gold", "-o", "pdf", "--to", str(path))
    assert (done.exit_code, done.output) == (0, "")
    assert path.read_bytes().startswith(b"%PDF-")
