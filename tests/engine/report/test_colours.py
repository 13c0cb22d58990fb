"""The colours of pictures, as people with any kind of colour vision see them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import fields

from openipu.engine.facts.values import MemoryUse, TimeParts
from openipu.engine.report.pictures import COLOURS
from openipu.engine.schedule.picture import svg
from openipu.engine.schedule.schedules import Grouped

import numpy as np
import pytest

# How red, green and blue light is seen if one kind of cones is missing (Machado, Oliveira and Fernandes, 2009).
VISIONS = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue cones": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
APART = 10.0
"""The least distance in CIELAB. Two is what an eye just notices."""


def seen(colour: str, vision: str) -> np.ndarray:
    """A colour in CIELAB, where distances are those that an eye sees."""
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    light = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    x, y, z = TO_XYZ @ np.clip(VISIONS[vision] @ light, 0, 1) / TO_XYZ.sum(1)
    x, y, z = (
        value ** (1 / 3) if value > (6 / 29) ** 3 else value / (3 * (6 / 29) ** 2) + 4 / 29 for value in (x, y, z)
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def too_close(pairs: Iterable[tuple[str, str]], vision: str) -> list[tuple[str, str, float]]:
    distances = [(a, b, float(np.linalg.norm(seen(a, vision) - seen(b, vision)))) for a, b in pairs]
    return [found for found in distances if found[2] < APART]


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("kinds", [TimeParts, MemoryUse])
def test_pieces_of_a_bar_can_be_told_apart(kinds, vision):
    colours = [COLOURS[field.name] for field in fields(kinds) if field.name != "reused"]
    assert too_close(itertools.combinations(colours, 2), vision) == []


@pytest.mark.parametrize("vision", VISIONS)
def test_forwards_and_backwards_can_be_told_apart(vision):
    style = svg(Grouped().table(2, 8))
    forwards, backwards = (re.findall(rf"\.{kind}\d\{{fill:(#[0-9a-f]{{6}})\}}", style) for kind in "FB")
    assert len(forwards) == len(backwards) == 8
    assert too_close(itertools.product(forwards, backwards), vision) == []


def test_every_viewer_draws_the_colours():
    assert not re.search(r'(fill|stroke)(:|=")(?!#[0-9a-f]{3,6}\b)', svg(Grouped().table(2, 8)))
