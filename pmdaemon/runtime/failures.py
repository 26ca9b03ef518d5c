"""Why a part of the server ended by itself: RUNTIME_DIR/NAME.failed, from its end until its next start.

While a part cannot start, ``sla-server status`` finds the reason nowhere else. A note that cannot be written
or read is no trouble of its own: the log has it, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pmdaemon.errors import SlaError
from pmdaemon.runtime.files import write_whole


@contextlib.contextmanager
def noted(runtime_dir: Path, name: str) -> Iterator[None]:
    """Run the part ``name``: forget how it ended before, and note the SlaError or OSError it ends by."""
    path = runtime_dir / f"{name}.failed"
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    try:
        yield
    except (SlaError, OSError) as exc:
        with contextlib.suppress(OSError):
            write_whole(path, f"{exc}\n")
        raise


def failures(runtime_dir: Path) -> dict[str, str]:
    """Parts that ended by an error and have not started since, and what they said."""
    found = {}
    for path in sorted(runtime_dir.glob("*.failed")):
        with contextlib.suppress(OSError):
            found[path.stem] = path.read_text(errors="replace").strip()
    return found
