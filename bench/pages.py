"""Writes the figures of README.md and docs/numerics.md, and the plot docs/decode.svg, from the newest results of a card.

    python -m bench.pages [--check]

A page holds each part between two marks; the text around them is kept. `--check` writes nothing and fails if a page is not
what the results say; the tests use it.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.plot import decode_plot
from bench.timing import ROOT

RESULTS = ROOT / "bench" / "results"
README, NUMERICS, PLOT = ROOT / "README.md", ROOT / "docs" / "numerics.md", ROOT / "docs" / "decode.svg"
BEGIN, END = "<!-- figures: made by bench/pages.py from bench/results -->", "<!-- end of figures -->"
README_ROWS = (1, 8, 32, 128, 256, 960)
ENGINE_NAME = re.compile(r"(?:synth:)?(.+), (\d+) at once(, continuous arrivals)?")
DTYPES = {"float16": "fp16", "float32": "fp32"}


class Report(NamedTuple):
    """One results file."""

    path: Path
    machine: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def source(self) -> str:
        card = self.machine["gpus"][0].partition(",")[0]
        return f"{card}, commit {self.machine['commit'][:7]}, `{self.path.relative_to(ROOT)}`"


def read_reports(folder: Path = RESULTS) -> list[Report]:
    """The files in `folder` that were measured on a card, the newest first."""
    contents = [(path, json.loads(path.read_text())) for path in folder.glob("*.json")]
    reports = [Report(path, content["machine"], content["results"]) for path, content in contents if content["machine"]["gpus"]]
    return sorted(reports, key=lambda report: str(report.machine["date"]), reverse=True)


def pages(reports: Sequence[Report]) -> dict[Path, str]:
    """Every page as the newest results of its kind say."""
    found = {README: _filled(README, readme_figures(reports)), NUMERICS: _filled(NUMERICS, drift_figures(reports))}
    rows = decode_rows(_newest(reports, decode_rows))
    if rows:
        found[PLOT] = decode_plot([row["details"] for row in rows])
    return found


def _newest(reports: Sequence[Report], rows: Callable[[Report], Any]) -> Report:
    """The first report that has such rows; where none has, the first of all."""
    return next(filter(rows, reports), reports[0])


def _filled(page: Path, figures: str) -> str:
    before, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)
    if not mark or not after[1]:
        raise ValueError(f"{page} must hold the lines {BEGIN!r} and {END!r}.")
    return f"{before}{BEGIN}\n\n{figures}\n{END}{after[2]}"


def decode_rows(report: Report) -> list[dict[str, Any]]:
    """The figures of `bench.decode`, without those of single kernels."""
    return [row for row in report.rows if "bound_ms" in row["details"]]


def readme_figures(reports: Sequence[Report]) -> str:
    """Tables of the decode step and of the whole engine, with the plot, as far as there are any."""
    step, engine = _newest(reports, decode_rows), _newest(reports, engine_rows)
    parts: list[str] = []
    if decode_rows(step):
        plot = "![Time of a decode step against the number of rows](docs/decode.svg)\n"
        parts += [f"On {step.source}.\n", decode_table(step), plot]
    if engine_rows(engine):
        parts += [f"On {engine.source}.\n", engine_table(engine)]
    return "\n".join(parts)


def decode_table(report: Report) -> str:
    rows = [row for row in decode_rows(report) if row["details"]["rows"] in README_ROWS]
    columns = [number for number in README_ROWS if any(row["details"]["rows"] == number for row in rows)]
    lines = []
    for model, state in dict.fromkeys((row["details"]["model"], row["details"]["state_dtype"]) for row in rows):
        of_model = {
            row["details"]["rows"]: row
            for row in rows
            if (row["details"]["model"], row["details"]["state_dtype"]) == (model, state)
        }
        name = f"{model}, {DTYPES[state]} state"
        lines.append([f"{name}: tokens/s", *(_number(of_model.get(number), "value") for number in columns)])
        lines.append(["of the bound", *(_percent(of_model.get(number)) for number in columns)])
        if any(row.get("target") for row in of_model.values()):
            lines.append(["target", *(_number(of_model.get(number), "target") for number in columns)])
    return _table(["decode step, fp16 weights, rows:", *map(str, columns)], lines)


def engine_rows(report: Report) -> dict[str, dict[int, dict[str, Any]]]:
    """The figures of `bench.engine` by model and number of requests."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in report.rows:
        match = ENGINE_NAME.fullmatch(row["name"])
        if match:
            found.setdefault(match[1] + (match[3] or ""), {})[int(match[2])] = row
    return found


def engine_table(report: Report) -> str:
    """The engine with scheduling and hand-over of tokens."""
    found = engine_rows(report)
    columns = sorted({number for rows in found.values() for number in rows})
    lines = []
    for model, rows in found.items():
        lines.append([f"{model}: tokens/s", *(_number(rows.get(number), "value") for number in columns)])
        limit = "of the undisturbed" if model.endswith("arrivals") else "of the bound"
        lines.append([limit, *(_percent(rows.get(number)) for number in columns)])
    return _table(["whole engine, requests at once:", *map(str, columns)], lines)


def drift_rows(report: Report) -> list[dict[str, Any]]:
    return [row for row in report.rows if "table" in row["details"]]


def drift_figures(reports: Sequence[Report]) -> str:
    """The tables of `bench.drift`: one for each heading, figures of all parts of a context in a line."""
    report = _newest(reports, drift_rows)
    rows = drift_rows(report)
    tables = []
    for heading in dict.fromkeys(row["details"]["table"] for row in rows):
        chosen = [row for row in rows if row["details"]["table"] == heading]
        columns = [f"{column:,}" for column in chosen[0]["details"]["columns"]]
        lines = [[row["name"], *(f"{value:.3g}" for value in row["details"]["values"])] for row in chosen]
        tables.append(_table([heading, *columns], lines))
    return "\n".join([f"On {report.source}.\n", *tables] if tables else [])


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _number(row: dict[str, Any] | None, field: str) -> str:
    return "" if row is None or row.get(field) is None else f"{row[field]:,.0f}"


def _percent(row: dict[str, Any] | None) -> str:
    if row is None or row["ratio"] is None:
        return ""
    return f"{100 * row['ratio']:.{0 if row['ratio'] >= 0.01 else 1}f} %"


def main() -> int:
    """Writes the pages, or with --check says which differ; the number of those is the exit code."""
    num_wrong = 0
    for path, text in pages(read_reports()).items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not what the results say; run `make docs`.\n")
            num_wrong += 1
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
