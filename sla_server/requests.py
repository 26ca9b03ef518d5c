"""Requests of the application server to ``services``: one model for each operation that has a body.

A rule is written once: the API validates with these models, the OpenAPI document shows them, and
``services.requests`` parses with them (docs/formats/messages.md, "Requests to services").

Unknown members are ignored, types are strict: "5" is no number.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from pmdaemon.poller.config import ListedGateway
from pmdaemon.wire.names import NAME_RE
from pmdaemon.wire.rates import LEAST_BURST_S, MOST_BURST_S
from sla_server.agreements.selectors import parse_labels
from sla_server.audit_chain import PRUNED
from sla_server.services.control.groups import MOST_VOLUMES, MOST_WEIGHT
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
    based_on: dict[str, int] | None = None
    """Agreements, or KIND/NAME, to versions the text was made from (0: none); others in force: refused."""
    may_enforce: bool = True
    """Whether an agreement may get ``control: enforce``: not where a mode needs a second person."""


class AgreementDelete(RequestBody):
    """The agreement to end."""

    name: str


class DocumentEnd(RequestBody):
    """The document to end, which is no agreement."""

    kind: Literal["Maintenance", "Calendar", "VolumeLabels", "Recipient", "Route", "Silence"]
    name: str


GroupName = Annotated[str, StringConstraints(pattern=f"^{NAME_RE.pattern}$")]


class RecipientTest(RequestBody):
    """The recipient that gets an event of its own, whatever the routes say."""

    name: str


class EventAgainBody(RequestBody):
    """Which event a recipient gets again; the REST body, the recipient is part of the path."""

    event_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Its id, or a beginning that no other id has."""


class EventAgain(EventAgainBody):
    """An event goes to a recipient again, whatever the routes say; the fields are those of the event."""

    name: str
    """Of the recipient."""
    at_us: int
    kind: str
    severity: Literal["info", "warning", "critical"]
    element: str
    subject: str
    text: str


class AcknowledgeBody(RequestBody):
    """What a person says of an event; the REST body, its id is part of the path."""

    note: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500)]
    """Others will read it."""


class Acknowledgement(AcknowledgeBody):
    """A person takes care of an event."""

    event_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    kind: str = ""
    """Of the event, for the text."""
    subject: str = ""


class ThrottleSet(RequestBody):
    """Exactly one of iops, bytes_per_s and cost_per_s; of a volume, a group of volumes, or a whole client."""

    volume: str | None = Field(default=None, min_length=1)
    client: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    """Only this client of the volume, beside what holds for it; without a volume of all that it uses."""
    group: GroupName | None = None
    """Instead of a volume: a name for several that share the rate. A group of that name is replaced."""
    volumes: dict[str, Annotated[float, Field(gt=0, le=MOST_WEIGHT)]] | None = Field(
        default=None, min_length=1, max_length=MOST_VOLUMES
    )
    """Of the group: the weight of each volume. While all of them wait, each has that share of the rate."""
    iops: float | None = Field(default=None, ge=LEAST.ops_per_s, lt=1e12)
    bytes_per_s: float | None = Field(default=None, ge=LEAST.bytes_per_s, lt=1e15)
    cost_per_s: float | None = Field(default=None, ge=LEAST.cost_per_s, lt=1e12)
    burst_s: float | None = Field(default=None, ge=LEAST_BURST_S, le=MOST_BURST_S)
    """So many seconds' worth of the rate may pass at once after a pause; 0.02 without it."""
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

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        whole = self.client if self.volume is None and self.group is None else None
        if sum(each is not None for each in (self.volume, self.group, whole)) != 1:
            raise ValueError("give either volume, or group and its volumes, or client")
        if (self.group is None) != (self.volumes is None):
            raise ValueError("a group has volumes: give both group and volumes, or neither")
        if self.group is not None and self.client is not None:
            raise ValueError("a client is one of a volume, not of a group: leave client out")
        return self

    @property
    def rates(self) -> dict[str, float | None]:
        """As ``Rates`` names them."""
        limits = {"cost_per_s": self.cost_per_s, "ops_per_s": self.iops, "bytes_per_s": self.bytes_per_s}
        return {**limits, "burst_s": self.burst_s}

    @property
    def subject(self) -> str:
        """What the audit log calls it."""
        return self.volume or (f"group {self.group}" if self.group else f"client {self.client}")


class ThrottleRelease(RequestBody):
    """The throttles of a volume, that of a group, that of a whole client, or one throttle."""

    volume: str | None = None
    client: str | None = None
    """With a volume: only those of this client of it. Without: that over all volumes that it uses."""
    group: str | None = None
    throttle_id: str | None = None

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        whole = self.client if self.volume is None else None
        if sum(each is not None for each in (self.volume, self.group, self.throttle_id, whole)) != 1:
            raise ValueError("give one of volume, group, client and throttle_id")
        return self

    @property
    def subject(self) -> str:
        """What the audit log calls it."""
        if self.client is not None:
            return f"{self.volume}/{self.client}" if self.volume is not None else f"client {self.client}"
        return f"group {self.group}" if self.group else self.volume or self.throttle_id or ""


class ModeSet(RequestBody):
    """Whether decisions are enforced or only observed, on all backends or on one.

    ``inherit`` takes a backend's own mode away: it has that of the server again.
    """

    mode: Literal["observe", "enforce", "inherit"]
    backend: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    of: Literal["control", "policy"] = "control"
    """Of policy: whether the caps of policies hold, where the mode is enforce, too."""

    @model_validator(mode="after")
    def _inherits(self) -> ModeSet:
        if self.mode == "inherit" and self.backend is None:
            raise ValueError("mode inherit is for one backend: give backend, or observe or enforce")
        return self


class PolicyPin(RequestBody):
    """The policy version to keep, whatever is published; none: the newest one is in force again."""

    version: int | None = Field(default=None, ge=1, lt=1 << 31)


class PolicyRollback(RequestBody):
    """Put the policy before the one in force in force."""

    version: int | None = Field(default=None, ge=1, lt=1 << 31)
    """The version that is in force, to be sure that this one is rolled back."""


class VolumesDecision(RequestBody):
    """Volumes to approve, or to revoke: which gateway they belong to."""

    volumes: list[Annotated[str, StringConstraints(min_length=1, max_length=200)]] = Field(
        min_length=1, max_length=1000
    )
    """Names, or patterns with * and ?."""
    gateways: list[Annotated[str, StringConstraints(min_length=1, max_length=GATEWAY_NAME_MAX)]] = Field(
        default_factory=list, max_length=1000
    )
    """Names or ids; none: the one gateway that is meant, or 409."""


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


ACCOUNT_NAME: Final = r"^[a-z0-9][a-z0-9._@+-]{0,63}$"
NOT_ACCOUNTS: Final = frozenset(("local", "schedule", "services"))
"""Who the audit log and API tokens name so is no account: the server's own token, and parts of the server."""


def _is_free(name: str) -> str:
    if name in NOT_ACCOUNTS:
        raise ValueError(f"{name!r} is not a person's name here; choose another one")
    return name


AccountName = Annotated[str, StringConstraints(pattern=ACCOUNT_NAME)]
RoleName = Literal["viewer", "operator", "admin"]
Password = Annotated[str, StringConstraints(min_length=12, max_length=1024)]


def _is_requested(action: str) -> str:
    """Triggers let rows leave the audit log that a row ``audit-pruned`` names."""
    if action == PRUNED:
        raise ValueError("only the database manager writes that rows have left the audit log")
    return action


class AccessChange(RequestBody):
    """A change of who may come in, or an entry of the audit log alone."""

    table: Literal["", "accounts", "api_tokens", "sessions"] = ""
    row: dict[str, Any] = Field(default_factory=dict)
    """Of that table, as it is stored."""
    action: Annotated[str, StringConstraints(pattern="^[a-z][a-z-]{2,39}$"), AfterValidator(_is_requested)]
    """Of the audit log."""
    subject: Annotated[str, StringConstraints(max_length=200)]
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class ApprovalRequest(RequestBody):
    """A change that is to wait for a second person."""

    op: Literal["mode", "policy_pin", "policy_rollback"]
    body: dict[str, Any] = Field(default_factory=dict)
    """Of that operation."""
    requested_as: Annotated[str, StringConstraints(max_length=600)]
    """The person behind who asks: the same for an account and its tokens."""
    lasts_s: Annotated[float, Field(gt=0, le=366 * 86_400)]


class ApprovalDecision(RequestBody):
    """A second person's word about a change that waits."""

    row: dict[str, Any]
    """Of ``approvals``, as it is stored."""
    approves: bool
    note: Annotated[str, StringConstraints(max_length=200)] = ""


class ApprovalAnswer(RequestBody):
    """The REST body that approves or refuses a change; its id is part of the path."""

    digest: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    """Of the change that was seen; another one is not approved by it."""
    note: Annotated[str, StringConstraints(strip_whitespace=True, max_length=200)] = ""
    """Others will read it."""


class AuditNote(RequestBody):
    """What a command did to the server's own files, for the audit log."""

    action: Literal["ca-init", "ca-token", "ca-issue", "ca-nbd", "ca-page", "ca-pair", "ca-revoke"]
    subject: Annotated[str, StringConstraints(max_length=200)]
    after: dict[str, str] = Field(default_factory=dict, max_length=8)


class _LabelledBody(RequestBody):
    labels: Annotated[str, StringConstraints(strip_whitespace=True, max_length=1000)] | None = None
    """Selector: it sees agreements with these labels alone (KEY=VALUE or KEY, with commas between)."""

    @field_validator("labels")
    @classmethod
    def _is_selector(cls, value: str | None) -> str | None:
        if value:
            parse_labels(value)
        return value


class NewUser(_LabelledBody):
    """An account to make."""

    name: Annotated[AccountName, AfterValidator(_is_free)]
    role: RoleName
    password: Password


class UserChange(_LabelledBody):
    """What to change of an account; what is left out stays."""

    role: RoleName | None = None
    enabled: bool | None = None


class NewToken(_LabelledBody):
    """An API token to make, for a program."""

    name: AccountName
    role: RoleName
    days: Annotated[float, Field(gt=0, le=3650)] = 90.0
    """It ends after so many."""


class NewPassword(RequestBody):
    """An account's next password."""

    password: Password
    current: Annotated[str, StringConstraints(max_length=1024)] = ""
    """Its password until now; an administrator needs none for another account."""
