"""The kinds of events: severity, meaning, what to do, and which event ends what another began.

docs/formats/events.md is generated from it (``python -m docs.events``), and a test holds that every kind that
the product raises is in it. Kinds that begin with ``agent-`` come from agents that are newer than the server.

A *condition* begins with one kind and ends with another: ``violation-opened`` and ``violation-closed`` are
the condition ``violation``. Two events are about the same condition if element and subject are equal, and,
for kinds with ``by``, that detail, too.

Pure. Source: E1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pmdaemon.wire.messages.alerts import ALERT_PREFIX
from sla_server.events.event import SEVERITIES, Event
from sla_server.events.recipients.base import Status

PAGE: Final = "docs/formats/events.md"


@dataclass(frozen=True, slots=True)
class EventKind:
    """One kind.

    Attributes:
        severity: as it is usually raised; the event's own counts.
        varies: another severity, and when it has that: ``critical while the promise is broken``.
        meaning: what has happened.
        action: what to do next.
        begins: the condition that it begins, "" for none.
        ends: the condition that it ends, "" for none.
        by: a detail that tells conditions of one subject apart.
    """

    severity: str
    meaning: str
    action: str = "Nothing; it is for the record."
    begins: str = ""
    ends: str = ""
    by: str = ""
    varies: str = ""

    @property
    def severities(self) -> tuple[str, ...]:
        """All that it may be raised with, the usual one first."""
        return self.severity, *(word for word in self.varies.split() if word in SEVERITIES)


_UNKNOWN: Final = EventKind("warning", "A kind that this release does not know.", "Read its text.")
_BROKEN: Final = "critical while the promise is broken"
_ENDED: Final = "warning if it has ended"

PROMISES: Final = {
    "violation-opened": EventKind(
        "critical",
        "A promise is broken.",
        "`sla why AGREEMENT`; see who uses the backend.",
        begins="violation",
    ),
    "violation-closed": EventKind("info", "The promise is kept again.", ends="violation"),
    "burn-rate": EventKind(
        "critical",
        "The error budget is used up too fast.",
        "`sla get slas`.",
        begins="burn-rate",
        by="alert",
        varies="warning for the slow alert",
    ),
    "burn-rate-ended": EventKind("info", "It is used up slowly again.", ends="burn-rate", by="alert"),
    "slices-revised": EventKind("info", "Late data changed slices that were judged."),
    "agreement-applied": EventKind("info", "An agreement is in force."),
    "agreement-ended": EventKind("info", "An agreement is no longer in force."),
    "agreement-unreadable": EventKind(
        "critical", "A stored agreement cannot be read.", "Apply it again.", varies=_ENDED
    ),
    "document-unreadable": EventKind(
        "critical", "A stored document cannot be read.", "Apply it again.", varies=_ENDED
    ),
    "maintenance-applied": EventKind("info", "Maintenance was announced or changed."),
    "maintenance-ended": EventKind("info", "Announced maintenance was ended."),
    "calendar-applied": EventKind("info", "A calendar is in force."),
    "calendar-ended": EventKind("info", "A calendar is no longer in force."),
    "volumelabels-applied": EventKind("info", "Labels of volumes are in force."),
    "volumelabels-ended": EventKind("info", "Labels of volumes were ended."),
    "report-issued": EventKind(
        "info", "A report of an agreement was issued.", "`sla report show REPORT`; the text names it."
    ),
    "thresholds-left-out": EventKind(
        "warning", "A gateway has too many thresholds.", "Fewer distinct limits."
    ),
}
CONTROL: Final = {
    "throttle-set": EventKind(
        "warning", "A volume is slowed down.", "`sla why VOLUME`.", begins="throttle", by="throttle_id"
    ),
    "throttle-released": EventKind("info", "It is slowed down no more.", ends="throttle", by="throttle_id"),
    "throttle-not-effective": EventKind(
        "critical",
        "A cap has no effect.",
        "Find the I/O that bypasses it.",
        varies="warning if an agent is too old for it",
    ),
    "unattributed": EventKind(
        "warning",
        "A promise is at risk and no neighbour explains it.",
        "`sla why AGREEMENT`; release the cap by hand that the text names, else look at the storage.",
        varies=_BROKEN,
    ),
    "infeasible": EventKind(
        "warning", "Floors add up to more than the backend gives.", "Renegotiate a floor.", varies=_BROKEN
    ),
    "control-oscillation": EventKind(
        "warning", "Control steps go up and down.", "See throttles over time.", varies=_BROKEN
    ),
    "neighbour-out-of-reach": EventKind(
        "warning", "No gateway can slow this load.", "Serve it by a gateway."
    ),
    "storage-fault": EventKind(
        "critical", "A backend hangs or fails.", "Look at the storage.", begins="storage-fault"
    ),
    "storage-recovered": EventKind("info", "The backend answers again.", ends="storage-fault"),
    "mode-changed": EventKind("info", "A person changed who may be slowed down."),
    "policy-applied": EventKind("info", "A policy of the policy job is in force."),
    "approval-requested": EventKind(
        "info",
        "A change waits for a second person.",
        "`sla approvals list`, then `sla approvals approve APPROVAL` or `sla approvals refuse APPROVAL`.",
    ),
}
GATEWAYS: Final = {
    "gateway-up": EventKind("info", "A gateway is there.", ends="gateway"),
    "gateway-recovered": EventKind("info", "A gateway answers again.", ends="gateway"),
    "gateway-stalled": EventKind(
        "warning", "A gateway does not answer.", "Look at its host.", begins="gateway"
    ),
    "gateway-lost": EventKind(
        "critical", "A gateway is gone.", "Look at its host and agent.", begins="gateway"
    ),
    "gateway-stopped": EventKind("info", "A gateway was stopped by its operator.", ends="gateway"),
    "gateway-detached": EventKind("info", "The daemon was restarted; gateways dial in again."),
    "gateway-refused": EventKind("warning", "A gateway was not let in.", "The text says why."),
    "gateway-enrolled": EventKind("info", "A gateway has its certificate."),
    "gateway-superseded": EventKind("warning", "A second agent took a gateway's place.", "Stop one of them."),
    "gateway-over-limit": EventKind("warning", "A gateway is above a limit.", "The text names the limit."),
    "enrolment-refused": EventKind(
        "warning",
        "An agent asked for a certificate in vain.",
        "The text says why. A token unknown, expired or used: `sla ca list`, then `sla ca token NAME`.",
    ),
    "clock-skew": EventKind("warning", "An agent's clock is wrong.", "Mend NTP on that host."),
    "cuts-lost": EventKind("critical", "Measurements are gone for good.", "Was a database restored?"),
    "client-new": EventKind("info", "A client was seen for the first time."),
    "volume-new": EventKind("info", "A volume was seen for the first time."),
    "volume-moved": EventKind(
        "warning", "A volume is on a different backend now.", "Check the agent's file."
    ),
    "volume-conflict": EventKind("warning", "Gateways name different backends.", "Make them agree."),
    "volume-pending": EventKind(
        "warning",
        "A volume is shown by a gateway it does not belong to, and does not count for that one.",
        "`sla volumes pending`, then `sla volumes approve VOLUME --gateway NAME`, or `revoke` in its place.",
    ),
    "volume-shared": EventKind("info", "A volume is used through several gateways."),
    "volume-approved": EventKind("info", "A person approved a volume of a gateway."),
    "volume-revoked": EventKind("info", "A person revoked a volume of a gateway."),
    "judged-without": EventKind(
        "warning",
        "Slices are judged without a gateway that does not own its volume any more.",
        "Nothing if the volume has moved; else `sla volumes approve VOLUME --gateway NAME`.",
    ),
    "streams-foreign": EventKind(
        "warning",
        "A gateway sends streams that are not its own; they are left out.",
        "Look at the agent of the gateway that is the subject, and who runs it.",
    ),
}
AGENTS: Final = {
    "certificate-expires": EventKind("critical", "A certificate of an agent ends soon.", "Enrol it again."),
    "certificate-not-renewed": EventKind(
        "warning",
        "An agent's certificate was not renewed; the old one is good until it expires.",
        "The text says why: the server's authority, or `tls` in the agent's `state_dir`.",
    ),
    "lease-expired": EventKind("warning", "An agent went back to its own caps.", "Why is it cut off?"),
    "plane-died": EventKind(
        "critical", "A data plane has died.", "The agent's log.", begins="plane", by="subject"
    ),
    "plane-stalled": EventKind(
        "critical",
        "A data plane does not answer.",
        "Its host.",
        begins="plane",
        by="subject",
        varies="warning for a monitor of QEMU",
    ),
    "plane-back": EventKind("info", "A data plane is back.", ends="plane", by="subject"),
    "qemu-lost": EventKind("warning", "A QEMU process is not reached.", "Its QMP socket."),
    "reload-incomplete": EventKind("warning", "Part of a reload waits.", "The text says for what."),
    "reload-refused": EventKind("warning", "A reload was refused.", "Correct the agent's file."),
    "reloaded": EventKind("info", "An agent has its new configuration."),
    "source-failed": EventKind("warning", "An agent cannot read its counters.", "The agent's log."),
    "space-source-failed": EventKind(
        "warning",
        "A source of space cannot be read.",
        "The text says why; see `[space]` in the agent's file.",
        begins="space-source",
        by="subject",
    ),
    "space-source-back": EventKind("info", "It can be read again.", ends="space-source", by="subject"),
    "spool-damaged": EventKind("critical", "An agent's spool is damaged.", "Check its disk."),
    "spool-overflow": EventKind("critical", "An agent dropped cuts.", "A larger spool."),
    "spool-write-failed": EventKind("critical", "An agent cannot write its spool.", "Check its disk."),
    "state-write-failed": EventKind("warning", "An agent cannot write its state.", "Check its disk."),
    "storage-away": EventKind(
        "warning",
        "The storage behind a volume does not answer its gateway.",
        "Start it, or correct the agent's file; `gateway-agent status` has its address.",
        begins="storage",
        by="subject",
    ),
    "storage-back": EventKind("info", "It answers.", ends="storage", by="subject"),
    "throttle-bound-hit": EventKind("warning", "Throttled I/O waited too long.", "Raise the cap."),
}
STORAGE: Final = {
    "space-low": EventKind(
        "warning",
        "A pool of storage is filling up.",
        "`sla describe pool NAME`; make room or add some.",
        begins="space",
        varies="critical above the critical mark",
    ),
    "space-enough": EventKind("info", "The pool has room again.", ends="space"),
    "space-oversubscribed": EventKind(
        "warning",
        "The volumes of a pool may grow to far more than the pool.",
        "`sla describe pool NAME`; add space, or promise less.",
        begins="oversubscription",
    ),
    "space-subscribed": EventKind("info", "They may not any more.", ends="oversubscription"),
    "space-claim-refused": EventKind(
        "warning",
        "A gateway names a backend for its pool of which others serve the volumes.",
        "`backend` of the source in the agent's file, or `sla volumes approve`.",
    ),
    "space-forecast": EventKind(
        "warning",
        "A pool will be full in some days.",
        "`sla describe pool NAME`; make room or add some.",
        begins="space-forecast",
    ),
    "space-forecast-ended": EventKind("info", "It will not be full that soon.", ends="space-forecast"),
    "space-growth": EventKind(
        "warning", "A pool has grown far more in a day than it does.", "Who writes so much?"
    ),
    "space-action": EventKind(
        "info",
        "A command of `[[storage.command]]` was run for a pool, or would have been, or an agreement "
        "was refused.",
        "Nothing, unless it failed: the text says why.",
        varies="warning if it failed or is run too often",
    ),
    "space-orphan": EventKind(
        "info", "A volume of a pool has not been used for days.", "Is it needed? Else remove it."
    ),
}
SERVER: Final = {
    "services-started": EventKind("info", "Services were started."),
    "process-restarted": EventKind("warning", "A process was restarted.", "The text says why it ended."),
    "template-lost": EventKind(
        "warning",
        "The process that parts are forked from was lost and made again; parts go on.",
        "The text says why; nothing is to be done if it happens once.",
    ),
    "policy-job-failed": EventKind(
        "warning", "The policy job that the server started has failed.", "`sla get jobs` says why."
    ),
    "rollup-job-failed": EventKind(
        "warning", "The rollup job that the server started has failed.", "`sla get jobs` says why."
    ),
    "back-test-job-failed": EventKind(
        "warning", "The back-test job that the server started has failed.", "`sla get jobs` says why."
    ),
    "single-job-failed": EventKind(
        "warning",
        "A job that the server started has failed: capacity, cost-model, demand, attribution, space or "
        "report-inputs.",
        "The subject is its name; `sla get jobs` says why.",
    ),
    "report-job-failed": EventKind(
        "warning", "The report job that the server started has failed.", "`sla get jobs` says why."
    ),
    "process-stalled": EventKind(
        "warning",
        "A process of the server, or an agent's parent, made no progress.",
        "CPU, memory and disk of its host: the server, or the gateway that is the subject.",
    ),
    "no-room-for-pair": EventKind("warning", "There is no memory for a further pair.", "More shared memory."),
    "mailbox-damaged": EventKind("critical", "A mailbox segment was damaged and made again.", "Report it."),
    "back-pressure": EventKind("warning", "A queue or a mailbox is nearly full.", "Which process is slow?"),
    "clock-stepped": EventKind(
        "warning", "The server's clock was set.", "`chronyc tracking`.", varies="info when it is right again"
    ),
    "database-away": EventKind(
        "critical", "The database cannot be used.", "The text says why.", begins="database-away"
    ),
    "database-back": EventKind("info", "The database can be used again.", ends="database-away"),
    "database-was-away": EventKind("info", "The database could not be used for a time; nothing was lost."),
    "database-emptied": EventKind(
        "critical",
        "The database is empty, though the server has stored in one before.",
        "Restore a backup, if that was not wanted.",
    ),
    "server-not-alone": EventKind(
        "critical",
        "Another server acts over the database of this one, whose file has no `[cluster.takeover]`.",
        "Stop one of them, or set `enabled` and restart.",
    ),
    "server-gave-up": EventKind(
        "warning",
        "The acting server could not act, gave the lease up by itself, and another server acts.",
        "The text says why: its way to the database, or a part that ends. `docs/operations/cluster.md`.",
    ),
    "data-refused": EventKind(
        "warning",
        "A record could not be stored and was put aside.",
        "Report it.",
        varies="critical if a whole message of a gateway is",
    ),
    "watermark-mended": EventKind("warning", "Ingest queue and database disagreed.", "Who changed SQL?"),
    "queue-damage": EventKind("critical", "Durable records are gone.", "Check the disk."),
    "archive-failed": EventKind(
        "critical", "Parquet files cannot be written.", "Make room on the disk.", begins="archive"
    ),
    "archive-written": EventKind("info", "They are written again.", ends="archive"),
    "file-damaged": EventKind("critical", "A Parquet file is damaged.", "Restore it; check the disk."),
    "file-missing": EventKind("critical", "A Parquet file is missing.", "Restore it from a backup."),
}
DELIVERY: Final = {
    "event-reserve-filling": EventKind(
        "warning",
        "A process raises more events than are taken.",
        "`sla get processes`: is delivery away? Else the disk of `DATA_DIR/events` is too slow.",
    ),
    "events-lost": EventKind("critical", "Events were counted, but not kept.", "`details` has the counts."),
    "event-receiver-failed": EventKind(
        "critical", "The server cannot take events of others.", "Mend `[events.receive]`, and restart."
    ),
    "event-queue-damage": EventKind("critical", "Events on disk are gone.", "Check the disk."),
    "event-state-not-written": EventKind(
        "critical",
        "What recipients have confirmed cannot be written; nothing is deleted from the queue of events.",
        "Make room on the disk; a restart meanwhile sends events again.",
        begins="event-state",
    ),
    "event-state-written": EventKind("info", "It is written again.", ends="event-state"),
    "delivery-failed": EventKind("critical", "A recipient did not take an event.", "Mend the recipient."),
    "recipient-failing": EventKind(
        "warning", "A recipient does not confirm.", "Mend the recipient.", begins="recipient-failing"
    ),
    "recipient-recovered": EventKind("info", "A recipient confirms again.", ends="recipient-failing"),
    "held-back-full": EventKind(
        "warning", "There is no room to hold more events back from a recipient.", "End a silence."
    ),
    "reminders-dropped": EventKind(
        "warning", "There was no room for reminders and escalations.", "End silences; acknowledge events."
    ),
    "pair-lost": EventKind(
        "critical",
        "The partner server was not heard; its events are delivered here.",
        "Is it down, or the network between the two? `sla events pair status` on both.",
        begins="pair",
    ),
    "pair-back": EventKind("info", "The partner server is back.", ends="pair"),
    "pair-mirror-behind": EventKind(
        "warning",
        "The partner does not have all events that recipients may still need.",
        "Mend the recipients that do not confirm, or give it more room (`events.pair.mirror_bytes`).",
        begins="pair-mirror",
    ),
    "pair-mirror-caught-up": EventKind("info", "The partner has them.", ends="pair-mirror"),
    "pair-set-back": EventKind(
        "warning",
        "The partner's disk was set back or lost; what the partner had on it alone is delivered here.",
        "Was an older copy restored there, or a disk replaced? If not, see to that disk.",
    ),
    "pair-refused": EventKind(
        "warning", "A connection between the partners was refused.", "The text says why; see its certificate."
    ),
    "pair-certificate-ends": EventKind(
        "warning", "The certificate for the partner ends within 14 days.", "`sla ca pair`; replace the files."
    ),
    "pair-failed": EventKind(
        "critical",
        "Events are mirrored no more.",
        "The text says why; once that is mended the server tries again by itself, within half an hour.",
    ),
    "notify-test": EventKind("info", "A person tries a recipient."),
    "event-sent-again": EventKind(
        "info",
        "A person has an event sent to a recipient again, whatever the routes say.",
        varies="as the event was: warning, critical",
    ),
    "event-acknowledged": EventKind("info", "A person takes care of an event: no more reminders of it."),
    "recipient-applied": EventKind("info", "A recipient is in force."),
    "recipient-ended": EventKind("info", "A recipient is no longer in force."),
    "route-applied": EventKind("info", "A route is in force."),
    "route-ended": EventKind("info", "A route is no longer in force."),
    "silence-applied": EventKind("info", "Events are held back for a time."),
    "silence-ended": EventKind("info", "A silence was ended."),
}
CLUSTER: Final = {
    "cluster-certificate-ends": EventKind(
        "warning",
        "The certificate of this node of the cluster ends within 30 days, or has ended; said once a day.",
        "`sla cluster invite`, `sla cluster join --again`, restart the node: `docs/operations/cluster.md`.",
        varies="critical once it has ended",
    ),
    "cluster-engine-died": EventKind(
        "warning",
        "The engine of this node of the cluster ended by itself and is started again.",
        "`sla cluster status`; its last lines are in the server's log.",
    ),
    "cluster-engine-reduced": EventKind(
        "warning",
        "The engine cannot write each message to disk before it acknowledges it.",
        "Install nats-server 2.12 or newer; see `docs/operations/cluster.md`.",
    ),
    "cluster-store-off": EventKind(
        "critical",
        "The engine of this node has turned its storage off: its disk is full, or fails.",
        "Make room on the disk, then restart the node; `sla cluster status`.",
    ),
}
RELAY: Final = {
    "relay-started": EventKind("info", "A relay was started.", ends="relay-documents"),
    "relay-documents-refused": EventKind(
        "critical",
        "Documents of a relay are wrong; those of before stay in force.",
        "Correct the file that the text names.",
        begins="relay-documents",
    ),
    "relay-documents-taken": EventKind("info", "They are right again, and in force.", ends="relay-documents"),
    "event-queue-filling": EventKind(
        "warning",
        "A relay's queue of events is nearly full; from 80 % on the recipient furthest behind loses events.",
        "Mend the recipient that is behind: `sla-server relay status`.",
        begins="event-queue",
    ),
    "event-queue-drained": EventKind("info", "It has room again.", ends="event-queue"),
}
GROUPS: Final = {
    "Promises": PROMISES,
    "Control": CONTROL,
    "Gateways": GATEWAYS,
    "Agents": AGENTS,
    "Storage": STORAGE,
    "The server": SERVER,
    "Delivery itself": DELIVERY,
    "A relay": RELAY,
    "A cluster": CLUSTER,
}
KINDS: Final = {name: kind for group in GROUPS.values() for name, kind in group.items()}
ELEMENTS: Final = (
    "sla", "volume", "group", "client", "backend", "pool", "gateway", "policy", "server", "supervisor",
    "pmdaemon", "dbmanager", "cluster", "relay", "recipient", "route", "silence", "maintenance", "calendar",
    "volumelabels", "event", "approval",
)  # fmt: skip
"""Kinds of thing that events are about."""


def is_known(kind: str) -> bool:
    """Whether a kind can occur: in the catalogue, or one of an agent that is newer than the server."""
    return kind in KINDS or kind.startswith(ALERT_PREFIX)


def described(kind: str) -> EventKind:
    """What is known of a kind."""
    return KINDS.get(kind, _UNKNOWN)


def runbook(kind: str, address: str = PAGE) -> str:
    """Link to what to do about it, on the page of that address."""
    return f"{address}#{kind}" if kind in KINDS else address


def status_of(event: Event) -> Status:
    """Whether a condition begins or ends with the event."""
    kind = described(event.kind)
    return Status.FIRING if kind.begins else Status.RESOLVED if kind.ends else Status.INFO


def condition_of(event: Event) -> str:
    """Name of the condition that it begins or ends; the kind where there is none."""
    kind = described(event.kind)
    return kind.begins or kind.ends or event.kind


def condition_key(event: Event) -> tuple[str, ...]:
    """Identity of that condition: equal for the event that begins it and the one that ends it."""
    by = described(event.kind).by
    told_apart = str(event.details.get(by, "")) if by else ""
    return condition_of(event), event.element, event.subject, told_apart


def endings(kind: str) -> tuple[str, ...]:
    """Kinds that end the condition which this kind begins; none for other kinds."""
    begins = described(kind).begins
    return tuple(name for name, each in KINDS.items() if begins and each.ends == begins)
