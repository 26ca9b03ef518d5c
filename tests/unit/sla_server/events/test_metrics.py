"""The figures of delivery as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from sla_server.events.metrics import render


def test_the_figures_are_those_of_the_rows() -> None:
    row = {"name": "mail", "waiting": 3, "attempt": 2, "confirmed": 40, "dead_letters": 1}
    text = render([row], {"services.normal": 0.25}, {"main": 0.5}, {"accepted": 7})
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == {
        ("sla_events_reserve_ratio", "services.normal"): 0.25,
        ("sla_events_queue_ratio", "main"): 0.5,
        ("sla_events_taken_total", "accepted"): 7,
        ("sla_events_waiting", "mail"): 3,
        ("sla_events_attempts", "mail"): 2,
        ("sla_events_confirmed_total", "mail"): 40,
        ("sla_events_dead_letters_total", "mail"): 1,
    }
