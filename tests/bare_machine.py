"""README's lines on a bare Debian: what it installs, its demo, its first steps. ``make first-steps-try``.

Started by deploy/bare_root.sh, which makes the root, ends all that runs in it and removes it afterwards. The
root's storage and clients are this machine's: what the README has the reader bring.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support.first_steps import OwnNetwork, Reader, commands
from tests.support.paths import ROOT

CHECKOUT: Final = Path("srv/sla")
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DOORS: Final = re.compile(
    r"PIP_\w+|SSL_CERT_\w+|CURL_CA_BUNDLE|REQUESTS_CA_BUNDLE|(https?|no|all)_proxy", re.IGNORECASE
)
"""Settings by which this machine reaches its package archives."""


def before() -> list[str]:
    """What the README says to run before its first steps: on a bare machine, and a demo that ends."""
    text = (ROOT / "README.md").read_text().split("\n## ", 1)[0]
    return re.findall(r"`(apt-get [^`]+|make demo ARGS=[^`]+)`", text)


class BareRoot:
    """A checkout in a root of its own; with the network of ``near``, if there is one."""

    def __init__(self, root: Path, near: OwnNetwork | None = None) -> None:
        self.root = root
        self.folder = root / CHECKOUT
        self._near = near

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if DOORS.fullmatch(key)}
        return {**kept, "PATH": PATH, "HOME": "/root", "LC_ALL": "C.UTF-8", "COLUMNS": "200"}

    def product(self, command: Sequence[str]) -> list[str]:
        inside = ["chroot", str(self.root), "sh", "-c", 'cd "$0" && exec "$@"', f"/{CHECKOUT}", *command]
        return self._near.product(inside) if self._near else inside

    def neighbour(self, command: Sequence[str]) -> list[str]:
        return self._near.product(command) if self._near else list(command)

    def close(self) -> None:
        if self._near:
            self._near.close()


def typed(place: BareRoot, line: str, *, status: int = 0, user: str = "") -> str:
    """A line of the README in the reader's shell, shown as it runs; what it printed."""
    print(f"\n$ {line}" + (f"    # as {user}" if user else ""), flush=True)
    other = ["setpriv", f"--reuid={user}", "--clear-groups"] if user else []
    process = subprocess.Popen(
        place.product([*other, "sh", "-c", line]),
        env=place.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    shown = []
    for each in process.stdout:
        print("  " + each, end="", flush=True)
        shown.append(each)
    if process.wait() != status:
        sys.exit(f"bare_machine: {line!r} ended with {process.returncode}, not {status}")
    return "".join(shown)


def closed(printed: str) -> None:
    """The demo's summary says that the cycle closed."""
    summary = printed[printed.rindex("\n{") :]
    if not json.loads(summary)["ok"]:
        sys.exit("bare_machine: the demonstration did not close its cycle")


def main(root: Path) -> None:
    place = BareRoot(root)
    install, demo = before()
    typed(place, install)
    refused = typed(place, demo, status=2, user="nobody")  # make's own status
    if "sudo apt-get install" not in refused:
        sys.exit("bare_machine: a user without rights is not told what to install")
    closed(typed(place, demo))
    near = OwnNetwork(root / "tmp")
    reader = Reader(BareRoot(root, near))
    try:
        print("\nthe first steps:", *commands(), sep="\n$ ", flush=True)
        reader.take()
    finally:
        statuses = reader.close()
    print(f"ended by Ctrl-C with {statuses}")
    left = [each for each in ("sla-data", "agent-state") if not (place.folder / each).exists()]
    if left:
        sys.exit(f"bare_machine: not where the README says: {left}")
    print("all lines of the README did what they say")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
