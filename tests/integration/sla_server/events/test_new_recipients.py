"""The process delivery and documents that change: a new recipient gets all that is raised from then on."""

from __future__ import annotations

from pathlib import Path

from pmdaemon.reserve.raising import EventRaiser
from tests.support.deliveries import event
from tests.support.delivery_process import delivering, put_in_force, until

ROUNDS = 12


def documents(recipients: int) -> str:
    """So many recipients, and a route to all of them."""
    names = [f"r{number}" for number in range(recipients)]
    each = "apiVersion: storage-sla/v1\nkind: Recipient\nmetadata: {name: NAME}\nspec: {file: {path: NAME}}\n"
    route = "apiVersion: storage-sla/v1\nkind: Route\nmetadata: {name: all}\nspec: {recipients: [NAMES]}\n"
    return "---\n".join(
        [*(each.replace("NAME", name) for name in names), route.replace("NAMES", ", ".join(names))]
    )


def test_what_is_raised_right_after_a_recipient_is_in_force_reaches_it(tmp_path: Path) -> None:
    with delivering(tmp_path, documents(1)):
        raiser = EventRaiser(tmp_path / "data" / "events" / "reserve", "services")
        raiser.initialized()
        for number in range(1, ROUNDS):
            put_in_force(tmp_path, documents(number + 1))
            raiser.record(event(number).row())

            def has_it(name: str = f"r{number}", event_id: str = f'"e{number}"') -> bool:
                return any(event_id in path.read_text() for path in tmp_path.rglob(name))

            until(has_it, f"the recipient of round {number} has the event")
        raiser.close()
        counts = {path.name: path.read_text().count("\n") for path in tmp_path.rglob("r[0-9]*")}
        assert counts[f"r{ROUNDS - 1}"] == 1, "the newest recipient has the newest event alone"
