"""Requests of the application server to ``services``: one model for each operation that has a body.

A rule is written once: the API validates with these models, the OpenAPI document shows them, and
``services.requests`` parses with them (docs/formats/messages.md, "Requests to services").

Unknown members are ignored, types are strict: "5" is no number.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from pmdaemon.poller.config import ListedGateway
from sla_server.services.control.throttle import LEAST

RATES: Final = ("iops", "bytes_per_s", "cost_per_s")
GATEWAY_NAME_MAX: Final = 200


def _without_control_characters(name: str) -> str:
    if not name.isprintable():
        raise ValueError("a name holds no control characters; remove them")
    return name


class RequestBody(BaseModel):
    """Base of the models."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)


class AgreementsApply(RequestBody):
    """Agreement documents to put in force, or to check only."""

    documents: str
    """YAML, one document or several."""
    dry_run: bool = False


class AgreementDelete(RequestBody):
    """The agreement to end."""

    name: str


class DocumentEnd(RequestBody):
    """The Maintenance or Calendar document to end."""

    kind: Literal["Maintenance", "Calendar"]
    name: str


class ThrottleSet(RequestBody):
    """Exactly one of iops, bytes_per_s and cost_per_s."""

    volume: str = Field(min_length=1)
    client: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    """Only this client of the volume, beside what holds for the volume."""
    iops: float | None = Field(default=None, ge=LEAST.ops_per_s, lt=1e12)
    bytes_per_s: float | None = Field(default=None, ge=LEAST.bytes_per_s, lt=1e15)
    cost_per_s: float | None = Field(default=None, ge=LEAST.cost_per_s, lt=1e12)
    duration_s: float | None = Field(default=None, gt=0, le=366 * 86_400)
    """Without it the throttle holds until it is released."""
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200)]
    """Others will read it."""
    force: bool = False
    """Set it although it breaks a promise of the volume itself."""

    @model_validator(mode="before")
    @classmethod
    def _one_rate(cls, members: Any) -> Any:
        """Before the rates themselves are checked: which of two is out of range does not matter."""
        if isinstance(members, dict) and sum(members.get(rate) is not None for rate in RATES) != 1:
            raise ValueError(f"needs exactly one of {', '.join(RATES)}")
        return members


class ThrottleRelease(RequestBody):
    """Either the throttles of a volume or one throttle."""

    volume: str | None = None
    client: str | None = None
    """With a volume: only those of this client of it."""
    throttle_id: str | None = None

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        if (self.volume is None) == (self.throttle_id is None):
            raise ValueError("give either volume or throttle_id")
        if self.client is not None and self.volume is None:
            raise ValueError("a client is one of a volume: give volume, too")
        return self


class ModeSet(RequestBody):
    """Whether decisions are enforced or only observed, on all backends or on one.

    ``inherit`` takes a backend's own mode away: it has that of the server again.
    """

    mode: Literal["observe", "enforce", "inherit"]
    backend: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None

    @model_validator(mode="after")
    def _inherits(self) -> ModeSet:
        if self.mode == "inherit" and self.backend is None:
            raise ValueError("mode inherit is for one backend: give backend, or observe or enforce")
        return self


class GatewayName(RequestBody):
    """The REST body that puts a gateway on the list; its address is part of the path."""

    name: Annotated[
        str,
        StringConstraints(strip_whitespace=True, min_length=1, max_length=GATEWAY_NAME_MAX),
        AfterValidator(_without_control_characters),
    ]


class GatewayListing(ListedGateway):
    """A gateway to dial, or to dial no more."""

    is_listed: bool
