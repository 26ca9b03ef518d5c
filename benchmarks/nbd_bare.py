"""A data plane whose completions are not counted: ``bench-nbd`` measures with it what counting costs.

No histogram, no thresholds, no sums; everything else is the plane of the product. For measurements only.
"""

from __future__ import annotations

from gateway_agent.nbd.accounting import StreamAccount
from gateway_agent.nbd.buffers import Finished
from gateway_agent.nbd.plane import main


def _record_nothing(_stream: StreamAccount, _finished: Finished, _now_ns: int) -> None:
    """In the place of ``StreamAccount.record``."""


if __name__ == "__main__":
    StreamAccount.record = _record_nothing  # type: ignore[assignment, method-assign]  # what this module is for
    main()
