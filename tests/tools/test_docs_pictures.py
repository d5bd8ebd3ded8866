"""The pictures of docs/ are those that the code draws."""

from __future__ import annotations

import struct
from xml.etree import ElementTree

import pytest

from scripts.docs_pictures import HEIGHT, PICTURES, PLACE, SCREENSHOT, WIDTH, Drawing, round_step, stacked_bars


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_a_picture_is_drawn_from_the_code(name: str) -> None:
    shown = (PLACE / name).read_text(encoding="utf-8")
    assert shown == PICTURES[name](), "run scripts/docs_pictures.py"
    ElementTree.fromstring(shown)


def test_all_pictures_but_the_screenshot_are_drawn() -> None:
    assert {path.name for path in PLACE.iterdir()} == {*PICTURES, SCREENSHOT}


def test_the_screenshot_is_a_small_png_of_the_window() -> None:
    content = (PLACE / SCREENSHOT).read_bytes()
    assert len(content) < 200_000
    assert content.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", content[16:24]) == (WIDTH, HEIGHT)


def test_texts_are_escaped() -> None:
    drawing = Drawing(100, 50)
    drawing.box(0, 0, 90, 20, "red", "<b>")
    assert ElementTree.fromstring(drawing.svg()).findtext(".//{*}text") == "<b>"


@pytest.mark.parametrize(("length", "step"), [(4.3, 0.5), (5.5, 1.0), (8.1, 1.0), (1.2, 0.2), (43.0, 5.0)])
def test_ticks_are_round(length: float, step: float) -> None:
    assert round_step(length) == pytest.approx(step)


def test_bars_are_as_long_as_their_sums() -> None:
    svg = stacked_bars([("a", {"x": 1.0, "y": 2.0}, ""), ("b", {"x": 2.0, "y": 4.0}, ", twice")], "GiB")
    assert "3.0 GiB" in svg
    assert "6.0 GiB, twice" in svg
