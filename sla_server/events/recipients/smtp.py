"""Mail: one for each group of a batch, plain text, STARTTLS unless the document says otherwise.

The Message-ID is made of the notices' identities, so a mail that is sent again has the same one and mail
programs show it once. Mails about one condition name a common ancestor, which makes a thread of them.

Within one batch a mail that was accepted is not sent again by this process while the rest is tried again;
after a crash it is (at least once). Thread: the recipient's.
"""

from __future__ import annotations

import hashlib
import smtplib
import socket
import ssl
from collections.abc import Iterator, Sequence
from email.message import EmailMessage
from itertools import groupby
from pathlib import Path
from typing import Final

from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.excerpt import printable
from sla_server.events.documents import SmtpSpec
from sla_server.events.recipients import wording
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, refused, retry
from sla_server.events.recipients.http_client import MENDED_AFTER_S, REASON_CHARACTERS
from sla_server.events.recipients.network import LEAST_S, Resolver, connect, cut_off, reason_of
from sla_server.events.recipients.secret_files import SecretUnusable, hidden, read_secret

PORTS: Final = {"starttls": 587, "tls": 465, "none": 25}
SUBJECT_CHARACTERS: Final = 120


def mails(spec: SmtpSpec, notices: Sequence[Notice]) -> Iterator[EmailMessage]:
    """One mail for each run of notices of one group."""
    for _key, group in groupby(notices, key=lambda notice: notice.group_key or notice.delivery_id):
        yield mail(spec, list(group))


def mail(spec: SmtpSpec, notices: Sequence[Notice]) -> EmailMessage:
    """The mail about some notices."""
    message, domain = EmailMessage(), spec.sender.rpartition("@")[2]
    title = f"{spec.subject_prefix} {wording.title(notices)}".strip()
    message["Subject"] = printable(title, SUBJECT_CHARACTERS)
    message["From"] = spec.sender
    message["To"] = ", ".join(spec.to)
    message["Date"] = wording.utc(notices[-1].event.at_us)
    message["Message-ID"] = f"<{_digest(*(notice.delivery_id for notice in notices))}@{domain}>"
    last = notices[-1]
    about = _digest(last.condition or last.event.kind, last.event.element, last.event.subject)
    message["References"] = f"<{about}@{domain}>"
    message["Auto-Submitted"] = "auto-generated"
    message["X-SLA-Severity"] = last.event.severity
    message.set_content(wording.text(notices))
    return message


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class _BoundedSmtp(smtplib.SMTP):
    """Connects within a deadline, name resolution included."""

    def __init__(
        self, spec: SmtpSpec, deadline: Deadline, resolver: Resolver, context: ssl.SSLContext
    ) -> None:
        self._spec = spec
        self._deadline = deadline
        self._resolver = resolver
        self._context = context
        super().__init__(
            local_hostname=socket.gethostname() or "localhost", timeout=max(LEAST_S, deadline.left_s())
        )
        self._host = spec.server  # the name that its certificate has to have

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        sock = connect(host, port, self._deadline, self._resolver)
        if self._spec.security != "tls":
            return sock
        try:
            return self._context.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise


class Smtp:
    """See the module."""

    kind = "smtp"

    def __init__(
        self,
        name: str,
        spec: SmtpSpec,
        secrets_dir: Path,
        resolver: Resolver,
        *,
        timeout_s: float,
        most_notices: int,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.most_notices = most_notices
        self._spec = spec
        self._secrets_dir = secrets_dir
        self._resolver = resolver
        self._accepted: dict[str, set[str]] = {}  # Message-ID of this batch to addresses that have it

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        messages = list(mails(self._spec, notices))
        self._accepted = {
            name: done for name, done in self._accepted.items() if name in {m["Message-ID"] for m in messages}
        }
        try:
            password = "" if self._spec.password_file is None else self._read(self._spec.password_file)
        except SecretUnusable as exc:
            return retry(str(exc), MENDED_AFTER_S)
        answer = self._send(messages, password, deadline)
        return Answer(
            answer.outcome, printable(hidden(answer.reason, [password]), REASON_CHARACTERS), answer.after_s
        )

    def close(self) -> None:
        """See ``Recipient``; connections are of one delivery."""

    def _read(self, name: str) -> str:
        return read_secret(self._secrets_dir / name)

    def _send(self, messages: Sequence[EmailMessage], password: str, deadline: Deadline) -> Answer:
        spec = self._spec
        try:
            ca_file = None if spec.ca_file is None else str(self._secrets_dir / spec.ca_file)
            context = ssl.create_default_context(cafile=ca_file)
        except OSError as exc:
            return retry(f"ca_file {spec.ca_file}: {reason_of(exc)}", MENDED_AFTER_S)
        try:
            with (
                _BoundedSmtp(spec, deadline, self._resolver, context) as client,
                cut_off(deadline, lambda: client.sock),
            ):
                code, said = client.connect(spec.server, spec.port or PORTS[spec.security])
                if code != 220:
                    return retry(_said(code, said))
                if spec.security == "starttls":
                    client.starttls(context=context)
                if spec.user is not None:
                    client.login(spec.user, password)
                return self._all(client, messages)
        except smtplib.SMTPAuthenticationError as exc:
            return retry(f"login refused: {_said(exc.smtp_code, exc.smtp_error)}", MENDED_AFTER_S)
        except smtplib.SMTPNotSupportedError as exc:
            return retry(f"{exc}; set security to what the server has", MENDED_AFTER_S)
        except smtplib.SMTPSenderRefused as exc:
            return retry(f"sender refused: {_said(exc.smtp_code, exc.smtp_error)}", MENDED_AFTER_S)
        except smtplib.SMTPDataError as exc:
            reason = _said(exc.smtp_code, exc.smtp_error)
            return refused(reason) if exc.smtp_code >= 500 else retry(reason)
        except smtplib.SMTPResponseException as exc:
            return retry(_said(exc.smtp_code, exc.smtp_error))
        except smtplib.SMTPException as exc:
            return retry("no answer in time" if deadline.passed else str(exc))
        except OSError as exc:
            wait = MENDED_AFTER_S if isinstance(exc, ssl.SSLCertVerificationError) else None
            return retry("no answer in time" if deadline.passed else reason_of(exc), wait)

    def _all(self, client: smtplib.SMTP, messages: Sequence[EmailMessage]) -> Answer:
        """Send what has not been accepted; an address that is refused for good makes a dead letter of it."""
        later: list[str] = []
        never: list[str] = []
        for message in messages:
            done = self._accepted.setdefault(message["Message-ID"], set())
            left = [address for address in self._spec.to if address not in done]
            if not left:
                continue
            try:
                problems = client.send_message(message, self._spec.sender, left)
            except smtplib.SMTPRecipientsRefused as exc:
                problems = exc.recipients
            done.update(address for address in left if address not in problems)
            for address, (code, said) in problems.items():
                (never if code >= 500 else later).append(f"{address}: {_said(code, said)}")
        if later:
            return retry("; ".join(later))
        return refused("; ".join(never)) if never else CONFIRMED


def _said(code: int, text: bytes | str) -> str:
    words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return f"{code} {' '.join(words.split())}"
