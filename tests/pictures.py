"""What a test sees of a picture: the figure that was written, and whether its file shows it."""

from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

SHOWN = 0.5  # of a line or bar: the rest may be behind a legend or between dashes


def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is written from now on."""
    figures, save = [], Figure.savefig

    def savefig(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def curves(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of every line, by its label in the legend."""
    lines = {str(line.get_label()): [tuple(map(float, xy)) for xy in line.get_xydata()] for line in axes.lines}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(lines)
    return lines


def bars(axes: Axes) -> dict[str, float]:
    """The length of every horizontal bar, by its label on the axis."""
    labels = [text.get_text() for text in axes.get_yticklabels()]
    return dict(zip(labels, (bar.get_width() for bar in axes.patches), strict=True))


def assert_shows(path: Path, figure: Figure, covered: Collection[str] = ()) -> None:
    """The file is the whole figure: every line and bar is where its numbers are, in its own colour.

    covered: labels of lines on which others lie.
    """
    pixels = imread(path)
    height, width = pixels.shape[:2]
    assert width >= 800
    assert abs(height / width - figure.bbox.height / figure.bbox.width) * width <= 1
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10, "a blank picture"
    seen = 0
    for axes in figure.axes:
        for line in axes.lines:
            if line.get_label() in covered:
                continue
            ends = line.get_transform().transform(line.get_xydata())
            at = [np.linspace(a, b, 50) for a, b in pairwise(ends)] or [ends]
            assert share_of_colour(pixels, np.concatenate(at), line.get_color(), figure) >= SHOWN, line.get_label()
            seen += 1
        for bar in axes.patches:
            corners = bar.get_window_extent()
            inside = np.linspace(corners.p0, corners.p1, 52)[1:-1]
            assert share_of_colour(pixels, inside, bar.get_facecolor(), figure) >= SHOWN, bar
            seen += 1
    assert seen


def share_of_colour(pixels: np.ndarray, points: np.ndarray, colour, figure: Figure) -> float:
    """The share of points (of the figure's coordinates) with a pixel of that colour on them or beside them."""
    height, width = pixels.shape[:2]
    columns, rows = np.round(points * (width / figure.bbox.width)).astype(int).T
    found = np.zeros(len(points), bool)
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            row = np.clip(height - 1 - rows + down, 0, height - 1)
            near = pixels[row, np.clip(columns + right, 0, width - 1), :3]
            found |= np.abs(near - to_rgb(colour)).max(axis=1) < 2 / 255  # a step of a byte and its rounding
    return float(found.mean())
