"""Reads a TOML file into tables, with errors that name the place.

Apart from ``config``, so that a command that only looks a value up does not import pydantic.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

from pmdaemon.errors import ConfigError

FORM: Final = 'Write key = value, text in quotes: name = "host-1"'
TOO_DEEP: Final = ("is nested too deeply", "Remove brackets: no setting needs more than 5 levels")
TOO_LONG: Final = "has more than 4,300 digits; write a smaller number"
SHOWN: Final = 32  # characters of a value that is too long
_DIGITS: Final = re.compile(r"\d[\d_]{4300,}")


def read_toml(path: Path | None) -> dict[str, Any]:
    """The file's tables, or nothing for no path.

    Raises:
        ConfigError: unreadable, not TOML (with line and column), or nested too deeply.
    """
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as exc:
        raise ConfigError(
            str(path), f"cannot be read: {exc.strerror}", "Give --config an existing file"
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(str(path), f"is not TOML: {exc}", "Save it as UTF-8") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(str(path), f"is not TOML: {exc}", FORM) from exc
    except RecursionError as exc:
        raise ConfigError(str(path), *TOO_DEEP) from exc
    except ValueError as exc:  # of int(), which says neither where nor what
        raise ConfigError(str(path), _long_number(path.read_text())) from exc


def _long_number(text: str) -> str:
    """Where the number is that Python does not read."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _DIGITS.search(line):
            key = line[: found.start()].partition("=")[0].strip()
            return f"line {number}: {key[:SHOWN]}: {found[0][:SHOWN]}... {TOO_LONG}"
    return f"a number {TOO_LONG}"
