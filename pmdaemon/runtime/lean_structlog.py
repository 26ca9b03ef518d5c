"""Imports structlog without rich.

structlog looks for rich, to colour lines that ours never are. Where the command line's tables have brought
it, finding it costs each process a tenth of a second of CPU and some MB. So the mains of the processes import
this before anything else that imports structlog. A module that needs rich imports it afterwards as ever.
"""

from __future__ import annotations

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # to import it fails, as if it were not installed
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
