"""The pictures of docs/how_it_works.md: which arrays live when. `python -m tests.meta.lifelines` writes them.

A bar of full height is an array of all tokens, one of half a height that of a shard; a wedge is written a shard at a time. What
is dashed is there without tiling.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parents[2] / "docs" / "images"
LEFT, STEP, ROW, TOP = 236, 46, 30, 58
# Grey that is legible on white and on black, and colours that are.
GREY, COLOURS = "#7d8590", {"whole": "#3b82c4", "shard": "#e08a1e", "grows": "#3b82c4", "untiled": "none"}
Kind = Literal["whole", "shard", "grows", "untiled"]


@dataclass(frozen=True)
class Line:
    """An array by its name and shape, and from which step to which it lives: all of it, of a shard, written, or untiled."""

    name: str
    shape: str
    spans: tuple[tuple[Kind, float, float], ...]


@dataclass(frozen=True)
class Picture:
    """phases: a title and its steps, from left to right; ticks: what stands under each step."""

    title: str
    phases: tuple[tuple[str, int], ...]
    ticks: tuple[str, ...]
    lines: tuple[Line, ...]


def of_shards(*starts: int, count: int = 4) -> tuple[tuple[Kind, float, float], ...]:
    """One bar for each of so many shards from each start on."""
    return tuple(("shard", start + i + 0.08, start + i + 0.92) for start in starts for i in range(count))


SHARDS = ("1", "2", "3", "4")
BOTH = (("forward", 4), ("backward", 4))
PICTURES = {
    "mlp": Picture(
        "The MLP: nothing of the size [T, I] is ever there",
        BOTH,
        SHARDS * 2,
        (
            Line("x", "[T, H]", (("whole", 0, 8),)),
            Line("gate, up, h", "[t, 3 I]", of_shards(0, 4)),
            Line("y", "[T, H]", (("grows", 0, 4),)),
            Line("dx", "[T, H]", (("grows", 4, 8),)),
            Line("dW, float32", "[3, H, I]", (("whole", 4, 8),)),
            Line("gate, up, h untiled", "[T, 3 I]", (("untiled", 0.1, 7.9),)),
        ),
    ),
    "moe": Picture(
        "A mixture of experts: experts compute the rows that chose them",
        BOTH,
        SHARDS * 2,
        (
            Line("x", "[T, H]", (("whole", 0, 8),)),
            Line("choice and its weights", "[T, k]", (("grows", 0, 4), ("whole", 4, 8))),
            Line("of one expert", "at most [t, 3 I]", of_shards(0, 4)),
            Line("y", "[T, H]", (("grows", 0, 4),)),
            Line("dx", "[T, H]", (("grows", 4, 8),)),
            Line("all experts untiled", "[k T, 3 I]", (("untiled", 0.1, 7.9),)),
        ),
    ),
    "loss": Picture(
        "The loss: its gradient is made while a shard's logits are there",
        (("forward", 4), ("backward", 1)),
        (*SHARDS, "scaled"),
        (
            Line("x", "[T, H]", (("whole", 0, 4),)),
            Line("logits", "[t, V]", of_shards(0)),
            Line("dx", "[T, H]", (("grows", 0, 4), ("whole", 4, 5))),
            Line("dW, float32", "[H, V]", (("whole", 0, 5),)),
            Line("logits untiled", "[T, V]", (("untiled", 0.1, 4.9),)),
        ),
    ),
    "block": Picture(
        'A decoder layer with scope="block": its input alone is kept, and may wait on the host',
        (("forward", 3), ("backward", 5)),
        ("before", "attention", "behind", "before", "attention", "behind", "attention", "before"),
        (
            Line("input", "[T, H]", (("whole", 0, 8),)),
            Line("q, k, v", "[T, ...]", (("grows", 0, 1), ("whole", 1, 2), ("grows", 3, 4), ("whole", 4, 7))),
            Line("attention's output", "[T, H]", (("whole", 1, 3), ("whole", 4, 7))),
            Line("MLP of a shard", "[t, 3 I]", (("shard", 2.1, 2.9), ("shard", 5.1, 5.9))),
            Line("output, its gradient", "[T, H]", (("grows", 2, 3), ("whole", 3, 6))),
            Line("gradient of the input", "[T, H]", (("grows", 5, 6), ("whole", 6, 8))),
            Line("dq, dk, dv", "[T, ...]", (("whole", 6, 8),)),
            Line("MLP untiled", "[T, 3 I]", (("untiled", 2.1, 5.9),)),
        ),
    ),
    "tile": Picture(
        "tile(fn): backward runs fn again, a shard at a time",
        BOTH,
        SHARDS * 2,
        (
            Line("arguments", "[T, ...]", (("whole", 0, 8),)),
            Line("all that fn keeps", "of a shard", of_shards(4)),
            Line("results", "[T, ...]", (("grows", 0, 4),)),
            Line("their gradients", "[T, ...]", (("grows", 4, 8),)),
            Line("shared gradients", "float32", (("whole", 4, 8),)),
            Line("all that fn keeps untiled", "of T tokens", (("untiled", 0.1, 7.9),)),
        ),
    ),
    "linear": Picture(
        "TiledLinear under FSDP or ZeRO-3: at most two tiles are gathered",
        BOTH,
        ("tile 1", "2", "3", "4", "tile 4", "3", "2", "1"),
        (
            Line("x", "[T, in]", (("whole", 0, 8),)),
            *(
                Line(
                    f"tile {i + 1}", "[in, out / 4]", (("shard", max(0, i - 1), i + 1), ("shard", max(4, 6 - i), 8 - i))
                )
                for i in range(4)
            ),
            Line("weight untiled", "[in, out]", (("untiled", 0.1, 7.9),)),
        ),
    ),
}


def svg(picture: Picture) -> str:
    steps = sum(count for _, count in picture.phases)
    width, bottom = LEFT + STEP * steps + 20, TOP + ROW * len(picture.lines)
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 30}" width="{width}" '
        f'font-family="sans-serif" font-size="12" fill="{GREY}">',
        f"<title>{escape(picture.title)}</title>",
    ]
    at = 0
    for name, count in picture.phases:
        x = LEFT + STEP * at
        made.append(text(x + STEP * count / 2, TOP - 34, name, anchor="middle", extra=' font-weight="bold"'))
        at += count
        made.append(rule(x, TOP - 26, bottom + 4))
    made.append(rule(LEFT + STEP * steps, TOP - 26, bottom + 4))
    long = any(len(tick) > 6 for tick in picture.ticks)
    for i, tick in enumerate(picture.ticks):
        size = ' font-size="9"' if long else ""
        made.append(text(LEFT + STEP * (i + 0.5), TOP - 12, tick, anchor="middle", extra=size))
    for row, line in enumerate(picture.lines):
        middle = TOP + ROW * (row + 0.5)
        made.append(text(LEFT - 84, middle + 4, line.name, anchor="end"))
        made.append(text(LEFT - 78, middle + 4, line.shape, extra=' font-size="10" opacity="0.8"'))
        made += [bar(kind, start, stop, middle) for kind, start, stop in line.spans]
    return "\n".join([*made, "</svg>", ""])


def text(x: float, y: float, words: str, *, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def rule(x: float, top: float, bottom: float) -> str:
    return f'<path d="M{x:g} {top:g}V{bottom:g}" stroke="{GREY}" stroke-width="0.6"/>'


def bar(kind: Kind, start: float, stop: float, middle: float) -> str:
    left, right, half = LEFT + STEP * start, LEFT + STEP * stop, 9 if kind != "shard" else 4.5
    fill = COLOURS[kind]
    if kind == "grows":
        points = f"{left:g},{middle + half:g} {right:g},{middle - half:g} {right:g},{middle + half:g}"
        return f'<polygon points="{points}" fill="{fill}"/>'
    dashed = f' stroke="{GREY}" stroke-dasharray="4 3"' if kind == "untiled" else ""
    size = f'width="{right - left:g}" height="{2 * half:g}"'
    return f'<rect x="{left:g}" y="{middle - half:g}" {size} fill="{fill}"{dashed}/>'


def main() -> None:
    for name, picture in PICTURES.items():
        (FOLDER / f"lives-{name}.svg").write_text(svg(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
