"""Figures of one mailbox: as a dictionary, as words for onlookers, and by metric names.

The words in the control block are what ``sla mailbox dump`` reads; each participant stores its own, when it
falls asleep and now and then while it does not. ``METRICS`` names the same figures as Prometheus would, with
a sentence each; there is no registry here, a part that exposes metrics takes them from ``samples``, and all
participants' stand in ``describe``.

Thread: any may read; ``publish`` belongs to the taking thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pmdaemon.mailbox.doorbell import Ringer
from pmdaemon.mailbox.hand import UnackedBatch
from pmdaemon.mailbox.layout import (
    C_BUSY,
    C_DISCARDED,
    C_FULL,
    C_HELD,
    C_INSPECTED,
    C_POSTED_BYTES,
    C_POSTS,
    C_RECLAIMED,
    C_RESETS,
    C_RINGS,
    C_SCANS,
    C_TAKEN_BYTES,
    C_TAKES,
    C_THRESHOLD,
)
from pmdaemon.mailbox.reader import LaneReader
from pmdaemon.mailbox.writer import LaneWriter

RESET_CAUSES: Final = ("invalid", "scans", "idle", "urgent", "returned")

METRICS: Final = {
    "posts": ("sla_mailbox_posts_total", "Messages posted, a copy for each recipient."),
    "bytes_posted": ("sla_mailbox_posted_bytes_total", "Payload of the messages posted."),
    "full": ("sla_mailbox_full_total", "Copies refused because slots or ring of their route were full."),
    "busy": ("sla_mailbox_busy_total", "Posts refused because a stopped process held the shared list."),
    "reclaimed": ("sla_mailbox_reclaimed_slots_total", "Slots freed after their messages were taken."),
    "rings": ("sla_mailbox_rings_total", "Doorbells rung for sleeping recipients."),
    "takes": ("sla_mailbox_takes_total", "Messages taken."),
    "bytes_taken": ("sla_mailbox_taken_bytes_total", "Payload of the messages taken."),
    "discarded": ("sla_mailbox_discarded_total", "Slots discarded because their checksum was wrong."),
    "scans": ("sla_mailbox_scans_total", "Searches for a message, empty ones included."),
    "slots_inspected": ("sla_mailbox_slots_inspected_total", "Slots met in searches; by takes, near 1."),
    "resets": ("sla_mailbox_resets_total", "Searches that began at the list's head again."),
    "threshold": ("sla_mailbox_reset_threshold_scans", "Searches between two resets, as adapted."),
    "in_hand": ("sla_mailbox_in_hand", "Messages taken and not released yet."),
}
"""Figure: its name as a metric, and what it means. Names that end in ``_total`` only rise."""
FILL_METRIC: Final = ("sla_mailbox_ring_fill_ratio", "Share of a route's ring that is not taken yet, 0 to 1.")


PUBLISHED: Final = {
    "posts": C_POSTS,
    "bytes_posted": C_POSTED_BYTES,
    "full": C_FULL,
    "reclaimed": C_RECLAIMED,
    "rings": C_RINGS,
    "busy": C_BUSY,
    "takes": C_TAKES,
    "bytes_taken": C_TAKEN_BYTES,
    "scans": C_SCANS,
    "slots_inspected": C_INSPECTED,
    "resets": C_RESETS,
    "discarded": C_DISCARDED,
    "threshold": C_THRESHOLD,
    "in_hand": C_HELD,
}
"""Figure: its word in the control block."""


class Sources(NamedTuple):
    """Where the figures of one mailbox come from."""

    writer: LaneWriter
    ringer: Ringer
    readers: Sequence[LaneReader]
    hand: UnackedBatch


def publish(words: memoryview, control: int, sources: Sources) -> None:
    """Store the figures into the control block that begins at word ``control``."""
    figures = stats(sources)
    figures["resets"] = sum(figures["resets"].values())
    figures["threshold"] = min(figures["threshold"], default=0)
    for figure, word in PUBLISHED.items():
        words[control + word] = figures[figure]


def stats(sources: Sources) -> dict[str, Any]:
    """Counters since attach; lists have an entry for each list searched."""
    writer, ringer, readers, hand = sources
    return {
        "posts": writer.posts,
        "bytes_posted": writer.bytes_posted,
        "full": writer.full,
        "reclaimed": writer.reclaimed,
        "busy": writer.busy,
        "repairs": getattr(writer, "repairs", 0),
        "rings": ringer.rings,
        "rings_missed": ringer.missed,
        "takes": sum(reader.takes for reader in readers),
        "bytes_taken": sum(reader.bytes_taken for reader in readers),
        "discarded": sum(reader.discarded for reader in readers),
        "scans": sum(reader.scans for reader in readers),
        "slots_inspected": sum(reader.inspected for reader in readers),
        "resets": {cause: sum(reader.resets[cause] for reader in readers) for cause in RESET_CAUSES},
        "threshold": [reader.threshold for reader in readers],
        "scans_since_reset": [reader.scans_since_reset for reader in readers],
        "scans_since_met": [reader.scans_since_met for reader in readers],
        "in_hand": len(hand),
        "ring_fill_ratio": writer.fill_ratios(),
    }


class MetricSample(NamedTuple):
    """One value of a metric."""

    metric: str
    labels: dict[str, str]
    value: float


def samples(name: str, figures: Mapping[str, Any]) -> Iterator[MetricSample]:
    """Figures of participant ``name`` (``stats``, or an entry of ``describe``) as metrics."""
    for figure, (metric, _) in METRICS.items():
        value = figures[figure]
        if isinstance(value, Mapping):  # resets, by cause
            for cause, count in value.items():
                yield MetricSample(metric, {"participant": name, "cause": cause}, count)
        else:
            lowest = min(value, default=0) if isinstance(value, list) else value
            yield MetricSample(metric, {"participant": name}, lowest)
    for recipient, ratio in figures.get("ring_fill_ratio", {}).items():
        yield MetricSample(FILL_METRIC[0], {"participant": name, "recipient": recipient}, ratio)


def metrics(name: str, figures: Mapping[str, Any]) -> dict[str, float]:
    """The same by metric name and labels, as Prometheus writes them."""
    found = {}
    for metric, labels, value in samples(name, figures):
        text = ",".join([f'{label}="{value}"' for label, value in labels.items()])
        found[f"{metric}{{{text}}}"] = value
    return found
