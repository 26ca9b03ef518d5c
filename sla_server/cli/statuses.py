"""Exit statuses of ``sla`` and ``sla-server``: the one table, of which pages and manuals are made. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple


class ExitStatus(NamedTuple):
    """What a status means, and what to do about it."""

    meaning: str
    remedy: str = ""


EXIT_STATUSES: Final[dict[int, ExitStatus]] = {
    0: ExitStatus("Done; --watch was ended by Ctrl-C."),
    1: ExitStatus(
        "The server refused, in its words, for documents with line and field; or what was asked is not so: "
        "diff --exit-code found a difference, admit says no or unknown, storage verify found damage, a test "
        "was not confirmed, the partner server is not connected, sla-server status found trouble.",
        "Correct it and repeat; the text says which.",
    ),
    2: ExitStatus(
        "The command line is wrong, or a file that it names is not there or is no text.",
        "sla COMMAND --help",
    ),
    65: ExitStatus(
        "What was read is wrong: a disk queue or mailbox is damaged; a trace, load, device, policy or "
        "agreement of a simulation; an agreement that another release has stored.",
        "The text names file, line or key.",
    ),
    66: ExitStatus("sla simulate: nothing is stored of that time, or an input is not there.", "As it says."),
    69: ExitStatus(
        "No server answers; or what a policy run needs (Java, the database) is not there.",
        "sla-server start --background, or name another server with --server.",
    ),
    70: ExitStatus("A fault of the program, or Spark failed.", "Report it with the file that it names."),
    71: ExitStatus("A disk queue or a mailbox is not there.", "The text says where it was looked for."),
    74: ExitStatus(
        "A file or directory cannot be made, read or written; memory or descriptors ran out.",
        "The text says which.",
    ),
    75: ExitStatus(
        "Not now: live values are missing (what is stored is shown); a change was taken and not answered "
        "within 25 s (it will be carried out), or waits for a second person (sla approvals list); the "
        "database cannot be used now; sla-server start --background: not all parts are ready within --limit "
        "(60 s).",
        "sla-server status; try again.",
    ),
    76: ExitStatus("What answers is not an SLA server.", "Check --server and proxies."),
    77: ExitStatus(
        "No token, or a wrong one; the runtime directory is open to others or not this user's; the database "
        "role of a policy run may not publish.",
        "The text says which.",
    ),
    78: ExitStatus(
        "A configuration file is wrong, or a part cannot start with this configuration or database.",
        "The text names the key, or the part and its reason.",
    ),
    79: ExitStatus("sla policy run: another run is under way.", "Wait for its end."),
    80: ExitStatus("sla policy run: nothing is stored yet to compute from.", "Let gateways report."),
    81: ExitStatus(
        "sla policy run: the back-test does not show that the new policy helps; it is not put in force.",
        "sla policy show says why.",
    ),
    130: ExitStatus("Interrupted."),
    143: ExitStatus("--watch was ended by SIGTERM."),
}
