"""Where the repository and the fixtures are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FIXTURES: Final = ROOT / "tests" / "fixtures"
SUPPORT: Final = ROOT / "tests" / "support"
