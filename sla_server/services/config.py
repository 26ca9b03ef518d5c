"""Configuration of the services process: table ``[services]`` of the server's file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pmdaemon.runtime.config import StrictModel
from sla_server.services.control.settings import ControlSettings


class ServicesConfig(StrictModel):
    """How the services process works; the control loop's own numbers are in ``[services.control]``."""

    mode: Literal["observe", "enforce"] = "observe"
    """What a new installation starts in; afterwards the mode last set by an operator holds."""

    policy_mode: Literal["observe", "enforce"] = "observe"
    """Whether caps of policies hold in a new installation, beside the mode of the backend; afterwards what an
    operator set last does (`sla mode enforce --policy`)."""

    control: ControlSettings = Field(default_factory=lambda: ControlSettings.model_validate({}))
    """Numbers of the control loop."""

    judge_every_s: float = Field(default=1.0, ge=0.05, le=60)
    """How often slices that are complete are looked for."""

    judge_late_s: float = Field(default=30.0, ge=0, le=600)
    """A slice is judged this long after its end even if a gateway has not reported; late data revise it.
    While the server is behind with storing what came, as much later, at most a quarter of an hour; and not
    before services have run for so long."""

    policy_look_s: float = Field(default=10.0, ge=0.1, le=3600)
    """How often a newly published policy version is looked for, beside its announcement."""

    request_limit_s: float = Field(default=5.0, ge=0.1, le=60)
    """A change that is not durable by then is answered 202 and completed later."""

    live_rows: int = Field(default=200, ge=10, le=400)
    """Most rows of each kind in the live view: what needs a look and what uses most, with totals of all."""

    outbox_limit_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """Records that wait while dbmanager is away: hours of events and slices of a large installation."""
