"""Line plots on two logarithmic axes as SVG, written by hand so that no plotting library is needed.

    python -m bench.plot {decode,prefill} RESULTS.json FILE.svg

Draws the time of a decode step against the number of rows from the results of `bench.decode`, or that of one prompt against its
tokens from those of `bench.prefill`, each beside its bound.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, HEIGHT = 790, 470
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 50, 60  # margins
COLOURS = ("#1b6ca8", "#c1440e", "#2e7d4f", "#7b3fa0", "#8a6d00", "#444444")
STYLE = "text{font:13px sans-serif;fill:#222}.tick{font-size:11px;fill:#555}.title{font-size:15px}.grid{stroke:#e3e3e3}"
Details = dict[str, Any]


class Line(NamedTuple):
    """Points (x, y), both above zero. A dashed line is a bound and has no dots."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    is_dashed: bool = False


class Axis(NamedTuple):
    """A logarithmic axis from `low` to `high`, laid over the pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def place(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)


def decode_plot(details: Iterable[Details]) -> str:
    """The SVG of time per step against rows, from the details of `bench.decode`'s results; others are passed over."""
    steps = [detail for detail in details if "bound_ms" in detail]
    return _time_plot(steps, "rows", "bound_ms", "Time of a decode step, fp16 weights; dashed: the bound of the card", "rows")


def prefill_plot(details: Iterable[Details]) -> str:
    """The SVG of time against the tokens of one prompt, from the details of `bench.prefill`'s results; others are passed over."""
    readings = [detail for detail in details if is_one_prompt(detail)]
    title = "Time of one prompt, fp16 weights; dashed: all products at the card's rate, or all weights once"
    return _time_plot(readings, "length", "floor_ms", title, "tokens")


def is_one_prompt(detail: Details) -> bool:
    """Whether `prefill_plot` draws a result with these details."""
    return "floor_ms" in detail and detail["prompts"] == 1


def _time_plot(details: Iterable[Details], x: str, bound: str, title: str, x_label: str) -> str:
    """A line of "ms" against `x` for each model and type of state, and a dashed one of `bound`."""
    series: dict[str, list[Details]] = {}
    for detail in details:
        series.setdefault(f"{detail['model']}, {detail['state_dtype'].replace('float', 'fp')} state", []).append(detail)
    lines = []
    for number, (name, points) in enumerate(series.items()):
        points.sort(key=lambda detail: detail[x])
        colour = COLOURS[number % len(COLOURS)]
        lines.append(Line(name, [(point[x], point["ms"]) for point in points], colour))
        lines.append(Line(f"{name}, bound", [(point[x], point[bound]) for point in points], colour, True))
    return line_plot(lines, title, x_label, "ms")


def line_plot(lines: Sequence[Line], title: str, x_label: str, y_label: str) -> str:
    """An SVG of all lines with a name at each solid line's end. Raises ValueError without points."""
    points = [point for line in lines for point in line.points]
    if not points:
        raise ValueError("A plot needs at least one point; the results hold none of the figures it draws.")
    xs, ys = zip(*points, strict=True)
    x_axis = Axis(min(xs), max(max(xs), min(xs) * 2), LEFT, WIDTH - RIGHT)
    y_ticks = decade_ticks(min(ys), max(ys))
    y_axis = Axis(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 22, title, "title"),
        *_grid(x_axis, sorted(set(xs)), y_axis, y_ticks),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, x_label, anchor="middle"),
        _text(LEFT, TOP - 6, y_label, "tick", "end"),
        *(part for line in lines for part in _line(line, x_axis, y_axis)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def decade_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last at or below `low` to the first at or above `high`, two at least."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [float(f"{factor}e{power}") for power in range(first, last + 1) for factor in (1, 2, 5)]
    begin = max(index for index, tick in enumerate(ticks) if tick <= low)
    end = min(index for index, tick in enumerate(ticks) if tick >= high)
    return ticks[begin : max(end, begin + 1) + 1]


def _grid(x_axis: Axis, x_ticks: Sequence[float], y_axis: Axis, y_ticks: Sequence[float]) -> list[str]:
    parts = []
    for tick in x_ticks:
        x = x_axis.place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y_axis.begin}" y2="{y_axis.end}"/>')
        parts.append(_text(x, y_axis.begin + 18, f"{tick:g}", "tick", "middle"))
    for tick in y_ticks:
        y = y_axis.place(tick)
        parts.append(f'<line class="grid" x1="{x_axis.begin}" x2="{x_axis.end}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(x_axis.begin - 8, y + 4, f"{tick:g}", "tick", "end"))
    return parts


def _line(line: Line, x_axis: Axis, y_axis: Axis) -> list[str]:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    width = 1.3 if line.is_dashed else 2
    stroke = f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="{width}"{dashes}/>'
    if line.is_dashed:
        return [stroke]
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in places]
    return [stroke, *dots, _text(places[-1][0] + 10, places[-1][1] + 4, line.name)]


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    plots = {"decode": decode_plot, "prefill": prefill_plot}
    parser.add_argument("plot", choices=plots)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rows = json.loads(args.results.read_text())["results"]
    args.out.write_text(plots[args.plot]([row["details"] for row in rows]))


if __name__ == "__main__":
    main()
