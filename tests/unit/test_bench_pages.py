"""What is made of results: plots, and the pages that show the newest ones."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import pages, plot

SVG = "{http://www.w3.org/2000/svg}"


def decode_result(model: str, rows: int, ms: float, target: float | None = None) -> dict[str, Any]:
    details = {"model": model, "rows": rows, "state_dtype": "float16", "ms": ms, "bound_ms": ms / 2}
    return {
        "name": f"decode {model}, {rows} rows", "value": rows / ms * 1e3, "unit": "tokens/s", "ratio": 0.5, "target": target,
        "details": details,
    }  # fmt: skip


def prefill_result(prompts: int, length: int, ms: float, target: float | None = None) -> dict[str, Any]:
    details = {
        "model": "7.2b", "prompts": prompts, "length": length, "state_dtype": "float16", "ms": ms, "floor_ms": ms / 4
    }  # fmt: skip
    return {
        "name": f"prefill 7.2b, {prompts}x{length}", "value": prompts * length / ms * 1e3, "unit": "tokens/s", "ratio": 0.25,
        "target": target, "details": details,
    }  # fmt: skip


def beside_result(figure: str, value: float, unit: str, bound: float | None, target: float | None = None) -> dict[str, Any]:
    details = {"beside": "7.2b, 64 streams", "figure": figure}
    return {"name": figure, "value": value, "unit": unit, "bound": bound, "target": target, "ratio": None, "details": details}


def write_results(folder: Path, name: str, date: str, gpus: list[str], results: list[dict[str, Any]]) -> None:
    machine = {"date": date, "gpus": gpus, "commit": "0123456789"}
    (folder / name).write_text(json.dumps({"machine": machine, "results": results}))


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pages.Report:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    results = [decode_result("7.2b", 8, 4.0, 2000), decode_result("7.2b", 3, 3.0), decode_result("1.5b", 1, 1.0)]
    engine = {"name": "synth:1.5b, 32 at once", "value": 5123.1, "unit": "tokens/s", "ratio": 0.004, "details": {}}
    drift = {
        "name": "recall, fp16 state", "value": 50.0, "unit": "% right", "ratio": None,
        "details": {"table": "recall after tokens", "columns": [16, 4096], "values": [100.0, 50.0]},
    }  # fmt: skip
    kernel = {"name": "decode 7.2b, 8 rows: gemm", "value": 1.0, "unit": "us", "ratio": None, "details": {"kernel": "gemm"}}
    write_results(tmp_path, "card.json", "2026-01-02", ["NVIDIA H200, 580"], [*results, engine, drift, kernel])
    (only,) = pages.read_reports(tmp_path)
    return only


def test_a_plot_shows_every_point_and_the_bound_as_a_dashed_line() -> None:
    details = [decode_result("7.2b", rows, 3.0 + rows / 50)["details"] for rows in (1, 32, 960)]
    root = ElementTree.fromstring(plot.decode_plot([*details, {"kernel": "gemm"}]))
    lines = root.findall(f"{SVG}polyline")
    assert ["stroke-dasharray" in line.attrib for line in lines] == [False, True]
    assert len(root.findall(f"{SVG}circle")) == 3
    xs = [float(circle.attrib["cx"]) for circle in root.findall(f"{SVG}circle")]
    assert xs == sorted(xs)
    assert (xs[0], xs[-1]) == (plot.LEFT, plot.WIDTH - plot.RIGHT)
    assert {"1", "32", "960", "7.2b, fp16 state", "rows", "ms"} <= {text.text for text in root.findall(f"{SVG}text")}


def test_a_plot_of_prompts_draws_single_ones_by_their_tokens() -> None:
    shapes = ((1, 4096), (8, 512), (1, 16))
    details = [prefill_result(prompts, length, prompts * length / 40)["details"] for prompts, length in shapes]
    root = ElementTree.fromstring(plot.prefill_plot([decode_result("7.2b", 8, 4.0)["details"], *details]))
    assert ["stroke-dasharray" in line.attrib for line in root.findall(f"{SVG}polyline")] == [False, True]
    assert [float(circle.attrib["cx"]) for circle in root.findall(f"{SVG}circle")] == [plot.LEFT, plot.WIDTH - plot.RIGHT]
    assert {"16", "4096", "7.2b, fp16 state", "tokens"} <= {text.text for text in root.findall(f"{SVG}text")}


def test_a_longer_time_stands_higher_in_a_plot() -> None:
    details = [decode_result("7.2b", rows, ms)["details"] for rows, ms in ((1, 3.0), (2, 30.0))]
    circles = ElementTree.fromstring(plot.decode_plot(details)).findall(f"{SVG}circle")
    assert float(circles[0].attrib["cy"]) > float(circles[1].attrib["cy"])


@pytest.mark.parametrize(
    ("low", "high", "ticks"), [(1.0, 10.0, [1, 2, 5, 10]), (0.3, 0.9, [0.2, 0.5, 1]), (3, 3, [2, 5]), (2, 2, [2, 5])]
)
def test_ticks_are_round_and_hold_all_values(low: float, high: float, ticks: list[float]) -> None:
    assert plot.decade_ticks(low, high) == ticks


def test_a_plot_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        plot.decode_plot([{"kernel": "gemm"}])


def test_pages_take_each_kind_of_figure_from_the_newest_file_of_a_card_that_has_it(report: pages.Report, tmp_path: Path) -> None:
    step = decode_result("7.2b", 8, 2.0)
    write_results(tmp_path, "newer.json", "2026-01-03", ["NVIDIA H200, 580"], [step])
    write_results(tmp_path, "older.json", "2026-01-01", ["NVIDIA H200, 580"], report.rows)
    write_results(tmp_path, "cpu.json", "2026-01-04", [], [step])
    reports = pages.read_reports(tmp_path)
    assert [each.path.name for each in reports] == ["newer.json", "card.json", "older.json"]
    text = pages.readme_figures(reports)
    assert "`newer.json`.\n\n| decode step, fp16 weights, rows: | 8 |" in text
    assert "`card.json`.\n\n| whole engine, requests at once: | 32 |" in text
    assert "`card.json`" in pages.drift_figures(reports)


def test_the_readme_table_has_a_line_for_figures_bounds_and_targets(report: pages.Report) -> None:
    assert pages.decode_table(report).splitlines()[:7] == [
        "| decode step, fp16 weights, rows: | 1 | 8 |",
        "| --- | --- | --- |",
        "| 7.2b, fp16 state: tokens/s |  | 2,000 |",
        "| of the bound |  | 50 % |",
        "| target |  | 2,000 |",
        "| 1.5b, fp16 state: tokens/s | 1,000 |  |",
        "| of the bound | 50 % |  |",
    ]


def test_the_readme_shows_card_commit_plot_and_engine(report: pages.Report) -> None:
    text = pages.readme_figures([report])
    assert "On NVIDIA H200, commit 0123456, `card.json`." in text
    assert "(docs/decode.svg)" in text
    assert "| 1.5b: tokens/s | 5,123 |\n| of the bound | 0.4 % |" in text


@pytest.fixture
def with_prompts(report: pages.Report) -> pages.Report:
    """The report with figures of prompts, and of prompts beside streams."""
    prompts = [prefill_result(8, 512, 100.0, 44_000), prefill_result(1, 4096, 128.0), prefill_result(1, 17, 10.0)]
    beside = [
        beside_result("undisturbed step", 9.876, "ms", None), beside_result("longest gap", 4.2, "steps", 5.0),
        beside_result("prompt of 32,768", 20_000.0, "tokens/s", 30_000.0, 18_000.0),
    ]  # fmt: skip
    return report._replace(rows=[*report.rows, *prompts, *beside])


def test_the_readme_shows_prompts_by_shape_with_their_plot(with_prompts: pages.Report) -> None:
    assert pages.prefill_table(with_prompts).splitlines() == [
        "| prompts, fp16 weights, prompts x tokens: | 1 x 4,096 | 8 x 512 |",
        "| --- | --- | --- |",
        "| 7.2b, fp16 state: tokens/s | 32,000 | 40,960 |",
        "| of the bound | 25 % | 25 % |",
        "| target |  | 44,000 |",
        "",
        "![Time to read one prompt against its tokens](docs/prefill.svg)",
    ]
    assert pages.prefill_table(with_prompts) in pages.readme_figures([with_prompts])


def test_the_readme_shows_what_prompts_cost_running_streams(with_prompts: pages.Report) -> None:
    assert pages.interference_table(with_prompts).splitlines() == [
        "| 7.2b, 64 streams | measured | to reach |",
        "| --- | --- | --- |",
        "| undisturbed step | 9.88 ms |  |",
        "| longest gap | 4.2 steps | under 5 steps |",
        "| prompt of 32,768 | 20,000 tokens/s | 18,000 tokens/s or more |",
    ]
    assert pages.interference_table(with_prompts) in pages.readme_figures([with_prompts])


def test_the_plot_of_prompts_is_a_page_as_soon_as_there_are_points(with_prompts: pages.Report, report: pages.Report) -> None:
    drawn = pages.pages([with_prompts])
    assert drawn[pages.PREFILL_PLOT] == plot.prefill_plot([row["details"] for row in with_prompts.rows])
    assert pages.PREFILL_PLOT not in pages.pages([report])


def test_without_figures_of_prompts_the_readme_speaks_of_none(report: pages.Report) -> None:
    text = pages.readme_figures([report])
    assert "prompts" not in text
    assert "prefill.svg" not in text
    assert "to reach" not in text


def test_prompts_that_are_read_together_alone_give_a_table_without_a_plot(report: pages.Report) -> None:
    only = report._replace(rows=[prefill_result(8, 512, 100.0)])
    assert "prefill.svg" not in pages.readme_figures([only])
    assert pages.PREFILL_PLOT not in pages.pages([only])


def test_contexts_become_columns_of_the_numerics_page(report: pages.Report) -> None:
    text = pages.drift_figures([report])
    assert "| recall after tokens | 16 | 4,096 |\n| --- | --- | --- |\n| recall, fp16 state | 100 | 50 |" in text


def test_each_table_of_errors_is_the_newest_of_its_heading(report: pages.Report) -> None:
    details = {"table": "error at tokens", "columns": [16], "values": [0.25]}
    newer = report._replace(path=pages.ROOT / "newer.json", rows=[{"name": "chunks", "details": details}])
    text = pages.drift_figures([newer, report])
    assert "`newer.json`" in text
    assert "| error at tokens | 16 |\n| --- | --- |\n| chunks | 0.25 |" in text
    assert pages.drift_figures([report]) in text


def test_a_page_keeps_the_text_around_its_figures(
    report: pages.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    for name in ("README", "NUMERICS"):
        monkeypatch.setattr(pages, name, page)
    text = pages.pages([report])[page]
    assert text.startswith(f"before\n{pages.BEGIN}\n")
    assert text.endswith(f"{pages.END}\nafter\n")
    assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="must hold the lines"):
        pages.pages([report])


def test_the_pages_show_the_newest_results() -> None:
    for path, text in pages.pages(pages.read_reports()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not what the results say; run `make docs`."
