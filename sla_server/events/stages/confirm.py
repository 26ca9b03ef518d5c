"""Confirm: what follows from a recipient's answer. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from pmdaemon.runtime.backoff import doubled
from sla_server.events.recipients.base import Answer, Outcome


class Step(Enum):
    """What a lane does next."""

    NEXT = "next"
    AGAIN = "again"
    SINGLY = "singly"
    DEAD_LETTER = "dead-letter"


@dataclass(frozen=True, slots=True)
class RetryRules:
    """See ``EventsConfig``."""

    first_s: float = 1.0
    max_s: float = 900.0
    give_up_s: float = 86_400.0
    jitter_ratio: float = 0.2


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The next step, and after how long."""

    step: Step
    wait_s: float = 0.0


def confirm(
    answer: Answer, attempt: int, failing_s: float, batch: int, rules: RetryRules, chance: random.Random
) -> Confirmation:
    """Decide.

    Args:
        answer: of the recipient.
        attempt: which try it was, from 1.
        failing_s: time since the first failure of this batch.
        batch: how many notices.
        rules: pauses and limits.
        chance: for the jitter.
    """
    if answer.outcome is Outcome.CONFIRMED:
        return Confirmation(Step.NEXT)
    if answer.outcome is Outcome.REFUSED:
        return Confirmation(Step.SINGLY if batch > 1 else Step.DEAD_LETTER)
    if failing_s >= rules.give_up_s:
        return Confirmation(Step.DEAD_LETTER)
    if answer.after_s is not None:
        return Confirmation(Step.AGAIN, min(max(answer.after_s, 0.0), rules.max_s))
    pause_s = doubled(rules.first_s, attempt - 1, rules.max_s)
    return Confirmation(Step.AGAIN, pause_s * (1 - rules.jitter_ratio * chance.random()))
