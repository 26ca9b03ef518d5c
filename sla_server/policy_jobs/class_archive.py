"""Where an archive of the classes that Spark's Java needs is, and the options with which Java uses it.

A start of Spark reads, links and checks some 10,000 classes out of 300 files; from an archive (Java calls it
class data sharing) they are mapped into memory. ``make_class_archive`` makes it. Java compares it at each
start with its own version and with path, size and time of each file that the classes came from; with an
archive that does not fit it reads the classes as before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path(sys.prefix) / "share" / "sla-server"
"""Within the installation: who can write there can change its code, too."""
NAME: Final = "spark-classes.jsa"
QUIET: Final = "-Xlog:disable -Xlog:all=error:stderr"
"""Java would warn of an archive that does not fit on standard output."""


def java_options(folder: Path = FOLDER) -> str:
    """What a Java process of Spark is started with to use the archive; empty: there is none for this user."""
    archive = folder / NAME
    return f'-XX:SharedArchiveFile="{archive}" {QUIET}' if os.access(archive, os.R_OK) else ""
