"""How many descriptors this process may have open."""

from __future__ import annotations

import resource
from typing import Final

import structlog

from pmdaemon.errors import ConfigError

NOFILE_MIN: Final = 256
log = structlog.get_logger("open-files")


def raise_open_files(wanted: int) -> int:
    """Raise RLIMIT_NOFILE to ``wanted`` or as far as the hard limit allows; returns the limit in force.

    Raises:
        ConfigError: the hard limit is too low to serve anything.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if not unlimited and hard < NOFILE_MIN:
        raise ConfigError(
            "RLIMIT_NOFILE",
            f"the hard limit is {hard} open files, at least {NOFILE_MIN} are needed",
            "Raise it with `ulimit -Hn`, in limits.conf, or by LimitNOFILE= of the systemd unit",
        )
    target = max(soft, wanted if unlimited else min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if target < wanted:
        log.warning("open-files-limited", limit=target, wanted=wanted, connections_at_most=target - 50)
    return target
