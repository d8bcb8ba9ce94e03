"""Writes the figures of README.md and docs/numerics.md, and the plots docs/decode.svg and docs/prefill.svg, from the newest
results of a card.

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

from bench.plot import decode_plot, is_one_prompt, prefill_plot
from bench.timing import ROOT

RESULTS = ROOT / "bench" / "results"
README, NUMERICS = ROOT / "README.md", ROOT / "docs" / "numerics.md"
PLOT, PREFILL_PLOT = ROOT / "docs" / "decode.svg", ROOT / "docs" / "prefill.svg"
BEGIN, END = "<!-- figures: made by bench/pages.py from bench/results -->", "<!-- end of figures -->"
README_ROWS = (1, 8, 32, 128, 256, 960)
README_PROMPTS = ((1, 512), (1, 4096), (1, 32_768), (8, 512), (8, 2048), (64, 64))  # and the tokens of each
ENGINE_NAME = re.compile(r"(?:synth:)?(.+), (\d+) at once(, continuous arrivals)?")
DTYPES = {"float16": "fp16", "float32": "fp32"}
Row = dict[str, Any]  # one result


class Report(NamedTuple):
    """One results file."""

    path: Path
    machine: dict[str, Any]
    rows: list[Row]

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
    for path, rows, plot in ((PLOT, decode_rows, decode_plot), (PREFILL_PLOT, one_prompt_rows, prefill_plot)):
        drawn = rows(_newest(reports, rows))
        if drawn:
            found[path] = plot([row["details"] for row in drawn])
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


def decode_rows(report: Report) -> list[Row]:
    """The figures of `bench.decode`, without those of single kernels."""
    return [row for row in report.rows if "bound_ms" in row["details"]]


def prefill_rows(report: Report) -> list[Row]:
    """The figures of whole models by `bench.prefill`."""
    return [row for row in report.rows if "floor_ms" in row["details"]]


def one_prompt_rows(report: Report) -> list[Row]:
    return [row for row in prefill_rows(report) if is_one_prompt(row["details"])]


def interference_rows(report: Report) -> list[Row]:
    return [row for row in report.rows if "beside" in row["details"]]


def readme_figures(reports: Sequence[Report]) -> str:
    """Tables of decode steps, prompts, the whole engine, and prompts beside streams, with the plots, as far as there are any."""
    parts: list[str] = []
    for rows, table in FIGURES:
        report = _newest(reports, rows)
        if rows(report):
            parts += [f"On {report.source}.\n", table(report)]
    return "\n".join(parts)


def decode_table(report: Report) -> str:
    """Tokens a second by rows, and the plot."""
    table = _step_table("decode step, fp16 weights, rows:", decode_rows(report), lambda details: details["rows"], README_ROWS)
    return f"{table}\n![Time of a decode step against the number of rows](docs/decode.svg)\n"


def prefill_table(report: Report) -> str:
    """Tokens a second by prompts and the tokens of each, and the plot if it has points."""
    head, rows = "prompts, fp16 weights, prompts x tokens:", prefill_rows(report)
    shapes = [f"{prompts} x {length:,}" for prompts, length in README_PROMPTS]
    table = _step_table(head, rows, lambda details: f"{details['prompts']} x {details['length']:,}", shapes)
    plot = "\n![Time to read one prompt against its tokens](docs/prefill.svg)\n" if one_prompt_rows(report) else ""
    return table + plot


def _step_table(head: str, rows: Sequence[Row], column: Callable[[dict[str, Any]], Any], columns: Sequence[Any]) -> str:
    """Tokens a second, share of the bound and target of each model and type of state, in those of `columns` that there are."""
    found: dict[tuple[str, str], dict[Any, Row]] = {}
    for row in rows:
        details = row["details"]
        if column(details) in columns:
            found.setdefault((details["model"], details["state_dtype"]), {})[column(details)] = row
    used = [each for each in columns if any(each in of_model for of_model in found.values())]
    lines = []
    for (model, state), of_model in found.items():
        lines.append([f"{model}, {DTYPES[state]} state: tokens/s", *(_number(of_model.get(each), "value") for each in used)])
        lines.append(["of the bound", *(_percent(of_model.get(each)) for each in used)])
        if any(row.get("target") for row in of_model.values()):
            lines.append(["target", *(_number(of_model.get(each), "target") for each in used)])
    return _table([head, *map(str, used)], lines)


def engine_rows(report: Report) -> dict[str, dict[int, Row]]:
    """The figures of `bench.engine` by model and number of requests."""
    found: dict[str, dict[int, Row]] = {}
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


def interference_table(report: Report) -> str:
    """What is read beside running streams, and what they notice of it."""
    rows = interference_rows(report)
    tables = []
    for heading in dict.fromkeys(row["details"]["beside"] for row in rows):
        lines = [
            [row["details"]["figure"], f"{_rounded(row['value'])} {row['unit']}", _goal(row)]
            for row in rows
            if row["details"]["beside"] == heading
        ]
        tables.append(_table([heading, "measured", "to reach"], lines))
    return "\n".join(tables)


def drift_rows(report: Report) -> list[Row]:
    return [row for row in report.rows if "table" in row["details"]]


def drift_figures(reports: Sequence[Report]) -> str:
    """The tables of `bench.drift` and `bench.chunks`: the newest of each heading, all figures of a title in a line."""
    parts: list[str] = []
    seen: set[str] = set()
    for report in reports:
        new = [heading for heading in dict.fromkeys(row["details"]["table"] for row in drift_rows(report)) if heading not in seen]
        seen.update(new)
        if new:
            parts += [f"On {report.source}.\n", *(_drift_table(report, heading) for heading in new)]
    return "\n".join(parts)


def _drift_table(report: Report, heading: str) -> str:
    chosen = [row for row in drift_rows(report) if row["details"]["table"] == heading]
    columns = [f"{column:,}" for column in chosen[0]["details"]["columns"]]
    lines = [[row["name"], *(f"{value:.3g}" for value in row["details"]["values"])] for row in chosen]
    return _table([heading, *columns], lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _goal(row: Row) -> str:
    """A figure with a target is to reach it at least, one with nothing but a bound is to stay below that."""
    if row.get("target") is not None:
        return f"{_rounded(row['target'])} {row['unit']} or more"
    return "" if row["bound"] is None else f"under {_rounded(row['bound'])} {row['unit']}"


def _number(row: Row | None, field: str) -> str:
    return "" if row is None or row.get(field) is None else f"{row[field]:,.0f}"


def _percent(row: Row | None) -> str:
    if row is None or row["ratio"] is None:
        return ""
    return f"{100 * row['ratio']:.{0 if row['ratio'] >= 0.01 else 1}f} %"


FIGURES: tuple[tuple[Callable[[Report], Any], Callable[[Report], str]], ...] = (
    (decode_rows, decode_table),
    (prefill_rows, prefill_table),
    (engine_rows, engine_table),
    (interference_rows, interference_table),
)


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
