"""A report as PDF: its HTML page, laid out by WeasyPrint (ADR 0032).

The library is needed for nothing else and is imported at the first PDF only: it takes some 60 MB. It gets the
page as text, which refers to nothing, and may fetch nothing.
"""

from __future__ import annotations

import logging
import os

from sla_server.reports.errors import PdfNotAvailable


def as_pdf(page: str) -> bytes:
    """The pages of an HTML page.

    Raises:
        PdfNotAvailable: the library, or one of the system that it needs, is not installed.
    """
    # In the file's metadata and its identifier: the same report is the same file.
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    try:
        from weasyprint import HTML
        from weasyprint.urls import URLFetcher
    except (ImportError, OSError) as exc:  # OSError: Pango is missing
        raise PdfNotAvailable(_first_line(exc)) from exc
    logging.getLogger("weasyprint").setLevel(logging.ERROR)  # it warns of each rule that is for screens alone
    made: bytes = HTML(string=page, url_fetcher=URLFetcher(allowed_protocols=())).write_pdf()
    return made


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
