"""The drawing of who did what to whom."""

from __future__ import annotations

from xml.etree import ElementTree

from dashboard.graph import MOST_LETTERS, MOST_LINES, Line, draw

SVG = "{http://www.w3.org/2000/svg}"


def line(number: int, weight: float, *, sure: bool = True) -> Line:
    return Line(f"v{number}", "gold/latency on disk", weight, sure, f"words {number}")


def parsed(lines: list[Line]) -> ElementTree.Element:
    return ElementTree.fromstring(draw(lines, "Who hurt whom"))


def test_each_name_is_there_once_and_each_line_has_its_words() -> None:
    root = parsed([line(1, 0.2), line(2, 0.7, sure=False), line(1, 0.1)])
    names = [node.findtext(f"{SVG}title") for node in root.iter(f"{SVG}text")]
    assert names == ["v2", "v1", "gold/latency on disk"], "the heaviest first"
    paths = list(root.iter(f"{SVG}path"))
    assert [path.findtext(f"{SVG}title") for path in paths] == ["words 1", "words 1", "words 2"]
    assert [path.get("stroke-dasharray") is not None for path in paths] == [False, False, True]
    assert [float(str(path.get("stroke-width"))) for path in paths] == [1.5, 2.8, 9.8]


def test_only_the_heaviest_lines_are_drawn() -> None:
    root = parsed([line(number, number / 100) for number in range(MOST_LINES + 5)])
    drawn = {path.findtext(f"{SVG}title") for path in root.iter(f"{SVG}path")}
    assert drawn == {f"words {number}" for number in range(5, MOST_LINES + 5)}


def test_names_of_others_are_text_and_long_ones_are_cut() -> None:
    name = "<script>&" + "x" * 60
    drawn = draw([Line(name, '"q"', 2.0, True, "</title>")], "<title>")
    (text, _) = ElementTree.fromstring(drawn).iter(f"{SVG}text")
    assert text.findtext(f"{SVG}title") == name
    assert len(text.text or "") == MOST_LETTERS
    assert "<script>" not in drawn
    assert "style" not in drawn


def test_nothing_to_draw_is_a_picture_all_the_same() -> None:
    assert parsed([]).findtext(f"{SVG}title") == "Who hurt whom"
