"""Documents that are generated are the ones their sources make today: ``make docs`` after a change."""

from __future__ import annotations

from docs import events, measurements, reference, report_schema


def test_measurements_are_those_stored() -> None:
    written = {path.name: path.read_text() for path in measurements.TARGET.glob("*.md")}
    assert written == measurements.pages()


def test_the_configuration_reference_is_that_of_the_models() -> None:
    assert reference.TARGET.read_text() == reference.render()


def test_the_page_of_events_is_that_of_the_catalogue() -> None:
    assert events.TARGET.read_text() == events.render()


def test_the_schema_of_reports_is_that_of_the_models() -> None:
    assert report_schema.TARGET.read_text() == report_schema.render(), "run 'make docs'"
