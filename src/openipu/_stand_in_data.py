"""Made-up images for machines without the real data: digits drawn as strokes, and coloured shapes.

A class is a *field*: an array with the distance of each point of a square from the outline of the class. An image
samples the field of its class under a random rotation, shear, size and shift, and inks the points that are near enough.
Only drawing these few fields is slow Python; sampling takes a handful of array operations for a whole block of images.

Images are drawn in blocks, each with its own seed, so the first n images are the same however many are requested.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
Labels = NDArray[np.uint8]
Field = NDArray[np.float32]
Values = NDArray[np.float64]
Split = Literal["train", "test"]
Draw = Callable[[np.random.Generator, Field, Labels], Images]

_RESOLUTION: Final = 96
_EXTENT: Final = 1.6  # a field covers the square from -1.6 to 1.6; its class is drawn inside -1 to 1
_BLOCK: Final = 1000
_SEED: Final = 20210602


def digits(split: Split, count: int) -> tuple[Images, Labels]:
    """`count` images (28, 28) of digits that look hand-drawn, and their labels."""
    return _blocks(split, count, (28, 28), np.stack([_strokes(digit) for digit in range(10)]), _digit_images)


def shapes(split: Split, count: int) -> tuple[Images, Labels]:
    """`count` images (32, 32, 3) of ten kinds of shapes in any colours, and their labels (count, 1)."""
    images, labels = _blocks(split, count, (32, 32, 3), _shape_fields(), _shape_images)
    return images, labels[:, None]


def _blocks(split: Split, count: int, shape: tuple[int, ...], fields: Field, draw: Draw) -> tuple[Images, Labels]:
    images = np.empty((count, *shape), np.uint8)
    labels = np.empty(count, np.uint8)
    for block, start in enumerate(range(0, count, _BLOCK)):
        rng = np.random.default_rng((_SEED, split == "test", block))
        part = slice(start, min(start + _BLOCK, count))
        size = part.stop - part.start
        labels_of_block = rng.integers(0, 10, _BLOCK, dtype=np.uint8)
        # Blocks are always drawn whole, so that a shortened block is the beginning of the full one.
        labels[part], images[part] = labels_of_block[:size], draw(rng, fields, labels_of_block)[:size]
    return images, labels


def _digit_images(rng: np.random.Generator, fields: Field, labels: Labels) -> Images:
    count = len(labels)
    distance = _sample(
        fields,
        labels,
        28,
        turn=rng.normal(0, 0.2, count),
        shear=rng.normal(0, 0.25, count),
        size=rng.uniform(0.52, 0.78, (count, 2)),
        shift=rng.uniform(-0.24, 0.24, (count, 2)),
    )
    width = rng.uniform(0.05, 0.15, (count, 1, 1)).astype(np.float32)
    ink = np.clip((width - distance) * 9 + 0.5, 0, 1)
    noise = rng.integers(0, 48, ink.shape, dtype=np.uint8)
    images: Images = np.maximum((ink * 255).astype(np.uint8), noise * (rng.random(ink.shape, np.float32) < 0.08))
    return images


def _shape_images(rng: np.random.Generator, fields: Field, labels: Labels) -> Images:
    count = len(labels)
    distance = _sample(
        fields,
        labels,
        32,
        turn=rng.uniform(-0.7, 0.7, count),
        shear=rng.normal(0, 0.1, count),
        size=np.repeat(rng.uniform(0.42, 0.8, (count, 1)), 2, axis=1),
        shift=rng.uniform(-0.25, 0.25, (count, 2)),
    )
    cover = np.clip(0.5 - distance * 12, 0, 1)[..., None]
    # Two random colours that are easy to tell apart. They do not depend on the class, so colour gives nothing away.
    ground = rng.uniform(30, 225, (count, 1, 1, 3)).astype(np.float32)
    contrast = rng.choice(np.array([-1, 1], np.float32), (count, 1, 1, 3)) * rng.uniform(50, 110, (count, 1, 1, 3))
    slope = rng.normal(0, 25, (count, 2, 1, 1, 3)).astype(np.float32)
    axis = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    shading = slope[:, 0] * axis[:, None] + slope[:, 1] * axis
    image = ground + shading + cover * contrast.astype(np.float32)
    image += rng.integers(-24, 25, image.shape, dtype=np.int8)
    images: Images = np.clip(image, 0, 255, out=image).astype(np.uint8)
    return images


def _sample(
    fields: Field, labels: Labels, pixels: int, *, turn: Values, shear: Values, size: Values, shift: Values
) -> Field:
    """Look up every pixel of every image in the field of its class, under one linear map per image."""
    axis = np.linspace(-1, 1, pixels, dtype=np.float32)
    cosine, sine = np.cos(turn), np.sin(turn)
    rotation = np.stack([cosine, -sine, sine, cosine], axis=-1).reshape(-1, 2, 2)
    slant = np.zeros_like(rotation) + np.eye(2)
    slant[:, 1, 0] = shear  # the column moves with the row
    to_cells = (_RESOLUTION - 1) / (2 * _EXTENT)
    matrix = (slant @ rotation / size[:, :, None] * to_cells).astype(np.float32)
    offset = ((_RESOLUTION - 1) / 2 - np.einsum("nij,nj->ni", matrix, shift)).astype(np.float32)
    index = labels.astype(np.int32)[:, None, None]
    for i in range(2):
        cell = (matrix[:, i, 0, None] * axis)[:, :, None] + (matrix[:, i, 1, None] * axis + offset[:, i, None])[:, None]
        index = index * _RESOLUTION + np.clip(cell, 0, _RESOLUTION - 1).astype(np.int32)
    return fields.reshape(-1)[index]


def _grid() -> tuple[Field, Field]:
    """The row (downwards) and column (to the right) of every cell of a field."""
    axis = np.linspace(-_EXTENT, _EXTENT, _RESOLUTION, dtype=np.float32)
    row, column = np.meshgrid(axis, axis, indexing="ij")
    return row, column


def _arc(
    row: float, column: float, height: float, width: float, start: float, stop: float
) -> list[tuple[float, float]]:
    """Points (row, column) on an ellipse; angles in degrees, clockwise from the right-hand side."""
    angles = np.radians(np.linspace(start, stop, 24))
    return [(row + height * float(np.sin(a)), column + width * float(np.cos(a))) for a in angles]


def _strokes(digit: int) -> Field:
    """The distance to the pen strokes of a digit, each a list of points (row, column) between -1 and 1."""
    strokes: list[list[tuple[float, float]]] = [
        [_arc(0, 0, 0.95, 0.6, 0, 360)],
        [[(-0.6, -0.35), (-0.95, 0.05), (0.95, 0.05)]],
        [[*_arc(-0.45, 0, 0.5, 0.55, 190, 400), (0.95, -0.6), (0.95, 0.6)]],
        [_arc(-0.48, -0.05, 0.46, 0.5, 200, 450), _arc(0.45, -0.05, 0.5, 0.58, 270, 520)],
        [[(0.3, 0.65), (0.3, -0.65), (-0.95, 0.25), (0.95, 0.25)]],
        [[(-0.95, 0.55), (-0.95, -0.45), (-0.15, -0.5), *_arc(0.38, -0.05, 0.56, 0.6, 240, 510)]],
        [[(-0.95, 0.4), *_arc(0.1, 0.05, 0.8, 0.65, 230, 180)], _arc(0.4, 0, 0.55, 0.55, 0, 360)],
        [[(-0.95, -0.6), (-0.95, 0.6), (0.95, -0.15)]],
        [_arc(-0.48, 0, 0.45, 0.46, 0, 360), _arc(0.46, 0, 0.5, 0.57, 0, 360)],
        [_arc(-0.42, 0, 0.53, 0.52, 0, 360), [(-0.42, 0.52), (0.2, 0.48), (0.95, 0.1)]],
    ][digit]
    row, column = _grid()
    nearest = np.full_like(row, np.inf)
    for stroke in strokes:
        for start, stop in pairwise(stroke):
            nearest = np.minimum(nearest, _to_segment(row, column, np.array(start), np.array(stop)))
    return nearest


def _to_segment(row: Field, column: Field, start: NDArray[Any], stop: NDArray[Any]) -> Field:
    step = stop - start
    along = np.clip(((row - start[0]) * step[0] + (column - start[1]) * step[1]) / (step @ step), 0, 1)
    distance: Field = np.hypot(row - start[0] - along * step[0], column - start[1] - along * step[1]).astype(np.float32)
    return distance


def _shape_fields() -> Field:
    """Signed distances (negative inside) from the outlines of ten shapes; only roughly right, which is enough."""
    row, column = _grid()
    radius, angle = np.hypot(row, column), np.arctan2(row, column)

    def box(height: float, width: float, down: float = 0.0, right: float = 0.0) -> Field:
        field: Field = np.maximum(abs(row - down) - height, abs(column - right) - width)
        return field

    def disc(size: float, down: float = 0.0, right: float = 0.0) -> Field:
        field: Field = np.hypot(row - down, column - right) - np.float32(size)
        return field

    triangle = np.maximum(row - 0.6, np.maximum(0.87 * column - 0.5 * row, -0.87 * column - 0.5 * row) - 0.5)
    fields = [
        disc(0.85),
        abs(radius - 0.68) - 0.2,  # ring
        box(0.75, 0.75),
        triangle,
        np.minimum(box(0.95, 0.28), box(0.28, 0.95)),  # cross
        box(0.3, 1.0),  # bar
        np.maximum(disc(0.9), -disc(0.75, 0.0, 0.5)),  # crescent
        np.minimum(disc(0.42, 0.0, -0.55), disc(0.42, 0.0, 0.55)),  # pair of discs
        (radius - 0.68 - 0.27 * np.cos(5 * angle)) * 0.6,  # five-pointed star
        np.maximum(box(0.9, 0.9), -row * column / 0.6),  # two squares touching at a corner
    ]
    return np.stack(fields).astype(np.float32)
