"""Documents that are generated are the ones their sources make today: ``make docs`` after a change."""

from __future__ import annotations

from docs import measurements, reference


def test_measurements_are_those_stored() -> None:
    written = {path.name: path.read_text() for path in measurements.TARGET.glob("*.md")}
    assert written == measurements.pages()


def test_the_configuration_reference_is_that_of_the_models() -> None:
    assert reference.TARGET.read_text() == reference.render()
