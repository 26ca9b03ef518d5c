"""Errors of ``sla``, each with what to do next and an exit status a script can tell apart.

SlaError (pmdaemon.errors)
└── CliError              1
    ├── ServerDown       69  no process answers at the address
    ├── NotAnAnswer      76  something answers that is not this server
    ├── UntrustedServer  77  its certificate is not one that is trusted here
    ├── NoToken          77  a change needs the token, and there is none, or it is wrong
    ├── RequestRefused    1  the server refused; carries its problem document
    ├── Pending          75  the server took the change but has not answered yet
    ├── LiveValuesMissing 75 what is stored was shown; what is so now is not known
    ├── JobFailed         1  the policy job ended with an error
    ├── PolicyNotPublished 81 what the policy job computed does not help
    └── BadUsage          2  the command line itself
"""

from __future__ import annotations

import re
from typing import Any, Final

from pmdaemon.errors import SlaError


class CliError(SlaError):
    """Root of the command line's errors."""


class ServerDown(CliError):
    """No process answers."""

    exit_status = 69  # EX_UNAVAILABLE
    retryable = True

    def __init__(self, server: str, reason: str) -> None:
        self.server = server
        super().__init__(
            f"no SLA server answers at {server} ({reason}).\n"
            "  Start one with:      sla-server start --background\n"
            "  Or name another one: sla --server URL ..., or set SLA_SERVER"
        )


class NotAnAnswer(CliError):
    """Something else listens at the address."""

    exit_status = 76  # EX_PROTOCOL

    def __init__(self, server: str, status: int) -> None:
        super().__init__(
            f"what answers at {server} (status {status}) is not an SLA server. "
            "Check --server and SLA_SERVER, and that no proxy stands between"
        )


class UntrustedServer(CliError):
    """Its certificate is not one that is trusted here; nothing was sent to it."""

    exit_status = 77  # EX_NOPERM

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(
            f"the certificate of {server} is not one that is trusted here, so nothing was sent ({reason}).\n"
            "  Name its authority, or the certificate itself: sla --ca-file FILE (or SLA_CA_FILE); of a "
            "certificate by 'sla ca page' it is DATA_DIR/ca/ca.crt"
        )


class NoToken(CliError):
    """A change needs the token."""

    exit_status = 77  # EX_NOPERM


_LISTS: Final = re.compile(r"GET /api/v1/([a-z]+) lists")


def _as_command(fix: str) -> str:
    """Where the API says by which request something is listed, the command that lists it."""
    return _LISTS.sub(r"'sla get \1' lists", fix)


class RequestRefused(CliError):
    """The server refused; carries its problem document, one line for each error of a document."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        self.status = status
        self.problem = problem
        lines = [str(problem.get("detail") or problem.get("title") or f"status {status}")]
        lines += [f"  {describe_error(item)}" for item in problem.get("errors") or [] if item.get("line")]
        if problem.get("fix"):
            lines.append(f"  {_as_command(str(problem['fix']))}")
        super().__init__("\n".join(lines))


class Pending(CliError):
    """The change was taken, the answer is still to come."""

    exit_status = 75  # EX_TEMPFAIL
    retryable = True

    def __init__(self, operation: str) -> None:
        super().__init__(
            "the server has taken the change, but its services part has not answered yet; the change will be "
            f"carried out when it does.\n  See how it went: GET {operation}, and 'sla-server status'"
        )


class ApprovalNeeded(CliError):
    """The change waits for a second person."""

    exit_status = 75  # EX_TEMPFAIL

    def __init__(self, detail: str, approval: str) -> None:
        super().__init__(f"{detail}.\n  Another account does it: sla approvals approve {approval[:8]}")


class LiveValuesMissing(CliError):
    """What is stored was shown, but the services part is silent: what is so now is not known."""

    exit_status = 75  # EX_TEMPFAIL
    retryable = True

    def __init__(self, silence: str) -> None:
        super().__init__(
            f"{silence}\n  Live values (states, rates, compliance) are not known: a dash says so"
        )


class JobFailed(CliError):
    """A job ended with an error, which it has printed."""

    def __init__(
        self, status: int, name: str = "policy", effect: str = "the policy in force stays as it was"
    ) -> None:
        self.exit_status = status if 0 < status < 126 else 1
        super().__init__(f"the {name} job ended with status {status}; {effect}")


class PolicyNotPublished(CliError):
    """The policy job has ended well, and what it computed does not help."""

    exit_status = 81

    def __init__(self) -> None:
        super().__init__(
            "the new policy was not published: its back-test does not show that it helps. The policy in "
            "force stays as it was.\n"
            "  See why:                     sla policy show\n"
            "  Put it in force all the same: sla policy pin VERSION"
        )


class BadUsage(CliError):
    """The command line itself is wrong."""

    exit_status = 2


def describe_error(item: dict[str, Any]) -> str:
    """One error of a document: line, document, field, problem, fix."""
    where = f"line {item['line']}: " + (f"{item['document']}: " if item.get("document") else "")
    field = f"{item['field']}: " if item.get("field") else ""
    fix = f" ({item['fix']})" if item.get("fix") else ""
    return f"{where}{field}{item.get('problem', item)}{fix}"
