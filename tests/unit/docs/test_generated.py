"""Documents that are generated are the ones their sources make today: ``make docs`` after a change."""

from __future__ import annotations

import re

from docs import events, man, measurements, reference, report_schema


def test_measurements_are_those_stored() -> None:
    written = {path.name: path.read_text() for path in measurements.TARGET.glob("*.md")}
    assert written == measurements.pages()


def test_the_configuration_reference_is_that_of_the_models() -> None:
    assert reference.TARGET.read_text() == reference.render()


def test_the_page_of_events_is_that_of_the_catalogue() -> None:
    assert events.TARGET.read_text() == events.render()


def test_manuals_and_the_page_of_commands_are_what_the_commands_say() -> None:
    assert {path.name: path.read_text() for path in man.FOLDER.glob("*.1")} == man.manuals()
    assert man.PAGE.read_text() == man.render()


def test_manuals_have_only_requests_that_man_knows() -> None:
    known = {"TH", "SH", "SS", "PP", "TP", "B", "BR", "br"}
    for name, text in man.manuals().items():
        lines = text.splitlines()
        requests = {line[1:].split()[0] for line in lines if line.startswith(".")}
        assert requests <= known, name
        assert not [line for line in lines if line.startswith("'")], name
        assert not re.search(r"(?<!\\)-|`", text), f"{name}: a hyphen that is no minus sign cannot be copied"
        assert text.count(".SH NAME\n") == text.count(".SH SYNOPSIS\n") == 1


def test_roff_escapes_what_it_would_obey() -> None:
    assert man.roff(".so x\n'y\n-l \\n") == "\\&.so x\n\\&'y\n\\-l \\en"


def test_the_schema_of_reports_is_that_of_the_models() -> None:
    assert report_schema.TARGET.read_text() == report_schema.render(), "run 'make docs'"
