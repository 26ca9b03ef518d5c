"""Who is notified of events, as documents: ``kind: Recipient``, ``kind: Route``, ``kind: Silence``.

A recipient is one way out of the server, a route says which events go to which recipients and how, a silence
holds events back for a time: once, or again and again (quiet hours). They are applied, versioned and audited
as Maintenance and Calendar documents are.

No document has a secret: it names a file (``secret_file``, ``password_file``, ``url_file`` ...) in the
directory ``notify.secrets_dir``. Commands and files are names in directories of the configuration, too, so
that the right to apply documents is not the right to read, write or run anything the server can. Pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote_plus, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from sla_server.agreements.fields import Document, Duration, Name, Pattern, Strict, is_new, refuse, shown
from sla_server.agreements.periods import PlannedWindow
from sla_server.events.event import NAME_CHARACTERS, SEVERITIES

RECIPIENT_KINDS: Final = (
    "webhook", "alertmanager", "smtp", "syslog", "file", "inbox", "command", "apprise", "heartbeat",
)  # fmt: skip
MOST_HEADERS: Final = 20
MOST_TIMEOUT_S: Final = 3600
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RENAMED: Final = re.compile(r".*\.[0-9]+")
_SECRET_KEY: Final = re.compile(
    r"(?:.*[_-])?(?:password|passwd|pass|secret|token|apikey|api[_-]key|private[_-]key|credentials?|bearer|auth)",
    re.IGNORECASE,
)
_SECRET_PARAMETER: Final = re.compile(
    rf"{_SECRET_KEY.pattern}|.*(?:token|secret|password|apikey)|"
    r"(?:.*[_-])?(?:key|sig|signature|code|pwd|sas|jwt)",
    re.IGNORECASE,
)
"""Names of parameters in the query of an address; ``key`` and ``code`` are what some services call theirs."""
_PARAMETER: Final = re.compile(r"[?&;#]([^=&;#?\s\"'<>]+)=([^&;#\s\"'<>]+)")
HIDDEN: Final = "***"
"""In place of a secret."""
_SECRET_HEADER: Final = re.compile(
    r"authorization|proxy-authorization|cookie|.*(?:token|secret|api-?key|password).*", re.I
)
_SECRET_HOSTS: Final = (
    "hooks.slack.com", "webhook.office.com", "logic.azure.com", "discord.com", "discordapp.com",
    "hc-ping.com", "events.pagerduty.com", "api.telegram.org",
)  # fmt: skip
"""Services whose addresses are secrets themselves."""
_HEADER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_OUR_HEADERS: Final = frozenset((
    "host", "content-length", "content-type", "transfer-encoding", "connection", "keep-alive",
    "trailer", "upgrade", "expect", "proxy-connection", "idempotency-key", "sla-signature",
))  # fmt: skip
"""Follow from the request; a second one would make it wrong."""
_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9._-]{1,253}")
_MAIL: Final = re.compile(r"[^\s@<>,;:\"()\[\]\\]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def _file_name(value: Any) -> str:
    if not isinstance(value, str) or _FILE_NAME.fullmatch(value) is None:
        raise refuse(
            f"{shown(value)} is not the name of a file",
            "Give a name without directories: letters, digits and . _ - (1 to 128, first a letter or digit)",
        )
    return value


def _url(value: Any, info: ValidationInfo) -> str:
    """An address without anything secret in it; what is refused is never repeated."""
    if not isinstance(value, str) or len(value) > 2000 or not value.isascii() or not value.isprintable():
        raise refuse("this is not an address", "Write it as https://host.example/path")
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        raise refuse("this is not an address", "Write it as https://host.example/path") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or " " in value:
        raise refuse(
            "the address begins with neither http:// nor https:// and a host",
            "Write it as https://host.example/path",
        )
    if "@" in parts.netloc:
        raise refuse(
            "the address holds a user name or password",
            "Leave it out and name a file: bearer_file, or url_file for the whole address",
        )
    if any(parts.hostname == host or parts.hostname.endswith(f".{host}") for host in _SECRET_HOSTS):
        raise refuse(
            f"addresses of {parts.hostname} are secrets themselves",
            "Write the address into a file in notify.secrets_dir and name it: url_file",
        )
    named = next((name for name, _ in _secret_parameters(value)), "")
    if named and is_new(info):  # what an earlier release has stored works on, and is shown without it
        raise refuse(
            f"the parameter {shown(named)} of the address is a secret",
            "Write the whole address into a file in notify.secrets_dir (chmod 600) and name it: url_file",
        )
    return value


def _secret_parameters(text: str) -> Iterator[tuple[str, str]]:
    """Name and value of each parameter of addresses in a text that looks as if it were a secret."""
    for found in _PARAMETER.finditer(text):
        name = unquote_plus(found[1])
        if _SECRET_PARAMETER.fullmatch(name):
            yield name, found[2]


def secrets_of_query(address: str) -> list[str]:
    """What must not be shown of the query of an address, as it is written and as it is meant."""
    return [text for _, value in _secret_parameters(address) for text in (value, unquote_plus(value))]


def without_secrets(value: Any) -> Any:
    """A JSON value in whose texts no address shows a secret; documents of earlier releases may have some."""
    if isinstance(value, str):
        for _, secret in _secret_parameters(value):
            value = value.replace(f"={secret}", f"={HIDDEN}")
        return value
    if isinstance(value, Mapping):
        return {key: without_secrets(each) for key, each in value.items()}
    return [without_secrets(each) for each in value] if isinstance(value, list) else value


def may_carry_bearer(address: str) -> bool:
    """Whether a token stays unread by others on the way there: by https, or on this host."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    try:
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    return parts.scheme == "https" or is_here


def _host(value: Any) -> str:
    if isinstance(value, str):
        try:
            return str(ipaddress.ip_address(value))
        except ValueError:
            if _HOST.fullmatch(value):
                return value
    raise refuse(f"{shown(value)} is not a host", "Use a name or an IP address, the port is a key of its own")


def _mail(value: Any) -> str:
    if not isinstance(value, str) or _MAIL.fullmatch(value) is None:
        raise refuse(f"{shown(value)} is not a mail address", "Write it as name@host.example")
    return value


def _unix_path(value: str) -> str:
    if not value.startswith("/") or len(value.encode()) > 107 or not value.isprintable():
        raise refuse(
            f"{shown(value)} is not the path of a socket", "Write it as /dev/log (at most 107 bytes)"
        )
    return value


FileName = Annotated[str, BeforeValidator(_file_name)]
"""A file in a directory of the configuration."""
WebUrl = Annotated[str, BeforeValidator(_url)]
Host = Annotated[str, BeforeValidator(_host)]
MailAddress = Annotated[str, BeforeValidator(_mail)]
Port = Annotated[int, Field(ge=1, le=65535)]


class _WithoutSecrets(Strict):
    """Refuses keys that look as if they held a secret, without repeating their values."""

    @model_validator(mode="before")
    @classmethod
    def _no_secrets(cls, members: Any) -> Any:
        if isinstance(members, Mapping):
            for key in members:
                if isinstance(key, str) and key not in cls.model_fields and _SECRET_KEY.fullmatch(key):
                    files = [name for name in cls.model_fields if name.endswith("_file")]
                    raise refuse(
                        f"{key}: secrets are not written in documents, which are stored and shown to people",
                        "Write it into a file in notify.secrets_dir (chmod 600)"
                        + (f" and name that file: {' or '.join(files)}" if files else ""),
                    )
        return members


class _HttpTarget(_WithoutSecrets):
    """An address, in the document or in a file."""

    url: WebUrl | None = None
    """The address; none with a secret in it."""
    url_file: FileName | None = None
    """Instead of ``url``: a file that holds the address."""
    bearer_file: FileName | None = None
    """Sent as ``Authorization: Bearer``, over https or to this host only."""
    ca_file: FileName | None = None
    """Certificates to trust in place of the system's; in ``notify.secrets_dir``, too."""
    headers: dict[str, str] = Field(default_factory=dict, max_length=MOST_HEADERS)
    """Further headers, none with a secret."""

    @model_validator(mode="after")
    def _complete(self) -> _HttpTarget:
        if (self.url is None) == (self.url_file is None):
            raise refuse(
                "needs exactly one of 'url' and 'url_file'", "Add for example url: https://host/path"
            )
        if self.bearer_file is not None and self.url is not None and not may_carry_bearer(self.url):
            raise refuse(
                "bearer_file: a token is not sent in clear over http",
                "Use https:// in url (http:// only to this host: 127.0.0.1, ::1 or localhost)",
                key="url",
            )
        for name, value in self.headers.items():
            if _HEADER.fullmatch(name) is None or not value.isprintable() or not value.isascii():
                raise refuse(f"{shown(name)} is not a header", "Use letters, digits and -", key="headers")
            if value != value.strip():
                problem = f"the value of {name} begins or ends with a blank"
                raise refuse(problem, "Remove it", key="headers")
            if name.lower() in _OUR_HEADERS:
                raise refuse(
                    f"the header {name} is set by the server for each request", "Remove it", key="headers"
                )
            if _SECRET_HEADER.fullmatch(name):
                raise refuse(
                    f"the header {name} carries a secret",
                    "Name a file instead: bearer_file",
                    key="headers",
                )
        return self


class WebhookSpec(_HttpTarget):
    """POST with a body as Alertmanager's webhooks have it, version 4."""

    secret_file: FileName | None = None
    """Key of the signature, HMAC-SHA256; without it nothing is signed."""


class AlertmanagerSpec(_HttpTarget):
    """POST to an Alertmanager's own API; ``url`` without /api/v2/alerts."""

    holds: Duration = 400 * 86_400
    """How long an alert lasts at most where its end never comes."""


class SmtpSpec(_WithoutSecrets):
    """Mail, one for each group."""

    server: Host
    """Host of the mail server."""
    port: Port | None = None
    """Default: 587, 465 with security tls."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """How the connection is protected."""
    sender: MailAddress
    """Address that mails come from."""
    to: list[MailAddress] = Field(min_length=1, max_length=50)
    """Addresses that mails go to."""
    user: str | None = Field(default=None, min_length=1, max_length=200)
    """Name to sign in with; goes with password_file."""
    password_file: FileName | None = None
    """File in notify.secrets_dir with the password."""
    ca_file: FileName | None = None
    """Certificates to trust in place of the system's; in notify.secrets_dir, too."""
    subject_prefix: str = Field(default="[storage-sla]", max_length=60)
    """Begins each subject."""

    @model_validator(mode="after")
    def _login(self) -> SmtpSpec:
        if (self.user is None) != (self.password_file is None):
            raise refuse("user and password_file go together", "Give both or neither")
        if self.user is not None and self.security == "none":
            raise refuse(
                "a password is not sent without TLS", "Use security: starttls or tls", key="security"
            )
        if not self.subject_prefix.isprintable():
            raise refuse("holds control characters", "Remove them", key="subject_prefix")
        return self


FACILITIES: Final = {
    "user": 1, "daemon": 3, "syslog": 5,
    **{f"local{number}": 16 + number for number in range(8)},
}  # fmt: skip


class SyslogSpec(_WithoutSecrets):
    """RFC 5424 with structured data: over TCP with octet counting, TLS, or a Unix socket."""

    server: Host | None = None
    """Host of the syslog server."""
    port: Port | None = None
    """Default: 601, 6514 with tls."""
    tls: bool = False
    """Whether the connection is protected."""
    ca_file: FileName | None = None
    """Certificates to trust in place of the system's; in notify.secrets_dir, too."""
    unix: Annotated[str, AfterValidator(_unix_path)] | None = None
    """Instead of ``server``: path of a socket, such as /dev/log."""
    facility: Literal[
        "user", "daemon", "syslog",
        "local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7",
    ] = "local0"  # fmt: skip
    """Facility of the messages."""
    app_name: Annotated[str, Field(pattern=r"^[!-~]{1,48}$")] = "storage-sla"
    """Name of the program in the messages."""

    @model_validator(mode="after")
    def _one_way(self) -> SyslogSpec:
        if (self.server is None) == (self.unix is None):
            raise refuse("needs exactly one of 'server' and 'unix'", "Add for example server: log.example")
        if self.unix is not None and (self.tls or self.port is not None):
            raise refuse("a Unix socket has neither port nor TLS", "Remove port and tls")
        return self


class FileSpec(_WithoutSecrets):
    """Lines of JSON in a file of ``notify.files_dir``."""

    path: FileName
    """Name of the file."""
    rotate_mb: float = Field(default=64.0, ge=0.01, le=100_000)
    """10^6 bytes; a file that would grow beyond is renamed to NAME.1 first."""
    keep: int = Field(default=5, ge=1, le=1000)
    """So many renamed files are kept."""

    @model_validator(mode="after")
    def _is_no_renamed_file(self) -> FileSpec:
        if _RENAMED.fullmatch(self.path):
            raise refuse(
                f"{shown(self.path)} is a name that renamed files get: it may be written over",
                "Give a name that does not end in . and a number",
                key="path",
            )
        return self


class InboxSpec(_WithoutSecrets):
    """The inbox of the page: people read there and acknowledge."""


class CommandSpec(_WithoutSecrets):
    """A program of ``notify.commands_dir``; notices come as JSON on its standard input."""

    argv: list[Annotated[str, Field(max_length=500)]] = Field(min_length=1, max_length=50)
    """The first is the program's file name."""

    @model_validator(mode="after")
    def _program(self) -> CommandSpec:
        if _FILE_NAME.fullmatch(self.argv[0]) is None:
            raise refuse(
                f"{shown(self.argv[0])} is not the name of a program in notify.commands_dir",
                "Put the program there and give its name without directories",
                key="argv[0]",
            )
        if any("\0" in part for part in self.argv):
            raise refuse("an argument holds a NUL character", "Remove it", key="argv")
        return self


class AppriseSpec(_WithoutSecrets):
    """Slack, Teams, PagerDuty and a hundred others through apprise; the addresses are secrets."""

    url_file: FileName
    """A file with one address of apprise a line."""


class HeartbeatSpec(_HttpTarget):
    """A request at an interval while delivery makes progress; its absence is noticed outside."""

    method: Literal["GET", "POST"] = "GET"
    """Method of the request."""
    interval: Duration = 60
    """Time between two requests."""


class RecipientSpec(_WithoutSecrets):
    """Exactly one of the kinds, and what all kinds have."""

    webhook: WebhookSpec | None = None
    """A POST as of Alertmanager."""
    alertmanager: AlertmanagerSpec | None = None
    """Alertmanager's own API."""
    smtp: SmtpSpec | None = None
    """Mail."""
    syslog: SyslogSpec | None = None
    """A syslog server or socket."""
    file: FileSpec | None = None
    """Lines of JSON in a file."""
    inbox: InboxSpec | None = None
    """The inbox of the page."""
    command: CommandSpec | None = None
    """A program on this machine."""
    apprise: AppriseSpec | None = None
    """Services that apprise knows."""
    heartbeat: HeartbeatSpec | None = None
    """A request while all is well."""
    timeout: Duration | None = None
    """The longest that one delivery may take, name resolution included; default: by kind."""
    batch: int = Field(default=100, ge=1, le=1000)
    """At most so many notices in one delivery."""
    per_minute: int | None = Field(default=None, ge=1, le=60_000)
    """At most so many deliveries a minute; what is more waits."""
    fallback: list[Name] = Field(default_factory=list, max_length=50)
    """Names of recipients that are notified of what this one does not take; default: all but customers."""

    @model_validator(mode="after")
    def _one_kind(self) -> RecipientSpec:
        given = [kind for kind in RECIPIENT_KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            problem = f"{' and '.join(given)} are given" if given else "the kind of recipient is missing"
            raise refuse(problem, f"Give exactly one of {', '.join(RECIPIENT_KINDS)}")
        if self.timeout is not None and self.timeout > MOST_TIMEOUT_S:
            raise refuse(f"is longer than {MOST_TIMEOUT_S} s", "Give at most 1h", key="timeout")
        if self.fallback and self.heartbeat is not None:
            raise refuse("a heartbeat takes no events", "Remove fallback", key="fallback")
        return self

    @property
    def kind(self) -> str:
        """Which one is given."""
        return next(kind for kind in RECIPIENT_KINDS if getattr(self, kind) is not None)

    @property
    def files(self) -> list[str]:
        """Names of the secret files that it needs."""
        target = getattr(self, self.kind)
        return [
            value
            for name in type(target).model_fields
            if name.endswith("_file") and (value := getattr(target, name)) is not None
        ]


class RecipientDocument(Document):
    """One ``kind: Recipient`` document."""

    kind: Literal["Recipient"]
    """A way out of the server."""
    spec: RecipientSpec
    """Which way, and how."""

    @model_validator(mode="after")
    def _falls_back_to_others(self) -> RecipientDocument:
        if self.name in self.spec.fallback:
            problem = f"{self.name} cannot take the place of itself"
            raise refuse(problem, "Name other recipients", key="spec.fallback")
        return self


Severity = Literal["info", "warning", "critical"]


def _subject(value: str) -> str:
    if not value.isprintable() or value != value.strip():
        raise refuse(
            f"{shown(value)} is not a subject or pattern",
            "Write it as events show it, such as erp-gold/latency, or with * and ?: erp-gold/*",
        )
    return value


SubjectPattern = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS), AfterValidator(_subject)]
"""A subject is a name, two of them (AGREEMENT/OBJECTIVE), an address or a file: what an event may show."""


class EventMatch(Strict):
    """Which events: of every key that is given one entry fits; without any key all events."""

    severities: list[Severity] = Field(default_factory=list, max_length=len(SEVERITIES))
    """info, warning or critical."""
    kinds: list[Pattern] = Field(default_factory=list, max_length=100)
    """Kinds of events, or patterns."""
    elements: list[Pattern] = Field(default_factory=list, max_length=20)
    """Kinds of things that events are about, or patterns."""
    subjects: list[SubjectPattern] = Field(default_factory=list, max_length=100)
    """Names of things that events are about, or patterns."""
    agreements: list[Pattern] = Field(default_factory=list, max_length=100)
    """Names or patterns of agreements."""
    gateways: list[Pattern] = Field(default_factory=list, max_length=100)
    """Names or patterns of gateways."""
    volumes: list[Pattern] = Field(default_factory=list, max_length=100)
    """Names or patterns of volumes."""

    def text(self) -> str:
        """For people: ``severities critical; kinds violation-*``."""
        parts = [
            f"{name} {', '.join(values)}"
            for name in type(self).model_fields
            if (values := getattr(self, name))
        ]
        return "; ".join(parts) or "every event"


GroupKey = Literal["agreement", "gateway", "volume", "element", "subject", "kind", "severity"]


class Escalation(Strict):
    """Who gets an event that no person has acknowledged."""

    after: Duration
    """How long no person has acknowledged it."""
    recipients: list[Name] = Field(min_length=1, max_length=50)
    """Names of Recipient documents."""


class RouteSpec(Strict):
    """Which events go to which recipients; every route that fits counts."""

    match: EventMatch = Field(default_factory=EventMatch)
    """Which events; absent: all."""
    recipients: list[Name] = Field(min_length=1, max_length=50)
    """Names of Recipient documents."""
    group_by: list[GroupKey] = Field(default_factory=list, max_length=7)
    """Events that are equal in these go out together."""
    group_wait: Duration | None = None
    """How long the first of a group waits for others; default: not at all."""
    remind: Duration | None = None
    """Send again at this interval until a person acknowledges it, or it has ended."""
    escalate: Escalation | None = None
    """Who else gets it when no person acknowledges it."""
    inhibit: bool = False
    """While a gateway is lost, leave out lesser events about it that neither begin nor end a condition."""

    @model_validator(mode="after")
    def _consistent(self) -> RouteSpec:
        if self.group_wait is not None and not self.group_by:
            raise refuse("nothing is grouped", "Add group_by, for example [agreement]", key="group_wait")
        return self


class RouteDocument(Document):
    """One ``kind: Route`` document."""

    kind: Literal["Route"]
    """Who is notified."""
    spec: RouteSpec
    """Which events go to whom."""


class SilenceSpec(PlannedWindow):
    """Which events are held back, when, and from whom; quiet hours are a silence that repeats."""

    match: EventMatch = Field(default_factory=EventMatch)
    """Which events are held back."""
    recipients: list[Name] = Field(default_factory=list, max_length=50)
    """Only from these; default: from all."""
    catch_up: bool = True
    """Deliver at its end what was held back, its own end with it; false: not at all."""
    author: str | None = Field(default=None, min_length=1, max_length=100)
    """Default: who applied the document."""


class SilenceDocument(Document):
    """One ``kind: Silence`` document."""

    kind: Literal["Silence"]
    """A time of quiet."""
    spec: SilenceSpec
    """Which events are held back, when."""
