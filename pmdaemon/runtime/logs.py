"""Logging: one line an event, ``key=value``, on stderr, with the process named; times in UTC.

Operators read these lines with ordinary tools; ``SLA_LOG_LEVEL`` (debug, info, warning, error) sets how many.
"""

from __future__ import annotations

import logging
import os
import sys

import structlog

from pmdaemon.errors import ConfigError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(process: str) -> None:
    """Set up structlog for this process.

    Raises:
        ConfigError: ``SLA_LOG_LEVEL`` is not one of the four levels.
    """
    name = os.environ.get("SLA_LOG_LEVEL", "info").lower()
    if name not in LEVELS:
        raise ConfigError("SLA_LOG_LEVEL", f"{name!r} is not a level", f"Use one of {', '.join(LEVELS)}")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "process", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[name]),
        # One write a line: processes share one stderr, and print() would write the line's end apart.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    # Bound for the whole process: contextvars of threads started later begin empty, so bind globally.
    structlog.configure(
        processors=[_NameAdder(process), *structlog.get_config()["processors"]],
    )


class _NameAdder:
    """Adds ``process=`` to every line of this process, in whichever thread it is written."""

    def __init__(self, process: str) -> None:
        self._process = process

    def __call__(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event.setdefault("process", self._process)
        return event
