"""Documents that are generated are the ones their sources make today: ``make docs`` after a change."""

from __future__ import annotations

from docs import events, measurements, reference


def test_measurements_are_those_stored() -> None:
    written = {path.name: path.read_text() for path in measurements.TARGET.glob("*.md")}
    assert written == measurements.pages()


def test_the_configuration_reference_is_that_of_the_models() -> None:
    assert reference.TARGET.read_text() == reference.render()


def test_the_page_of_events_is_that_of_the_catalogue() -> None:
    assert events.TARGET.read_text() == events.render()
