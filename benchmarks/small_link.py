"""``python -m benchmarks.small_link --config FILE``: a link process whose spool drops cuts within seconds.

An agent's file must ask for 4 MiB at least, because a smaller spool cannot hold a large cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from gateway_agent.config import load_agent
from gateway_agent.link import main as link
from pmdaemon.runtime import logs
from pmdaemon.runtime.hangup import Hangup
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadInbox, watch

SPOOL_BYTES: Final = 6 << 10


@click.command()
@click.option("--config", "path", type=click.Path(path_type=Path), required=True)
def main(path: Path) -> None:
    """Run the link process with a spool of ``SPOOL_BYTES``."""
    logs.configure("link")
    config = load_agent(path).model_copy(update={"spool_bytes": SPOOL_BYTES})  # not validated, on purpose
    stop = Stop()
    stop.install_signals()
    stop.watch_parent()
    hangup = Hangup()
    hangup.install()
    said_of_parent = ThreadInbox[str]()
    watch(stop, on_parent=said_of_parent.put)
    link.run(config, stop, path, hangup, said_of_parent)


if __name__ == "__main__":
    main()
