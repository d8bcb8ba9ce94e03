"""What benchmarks make of figures: bounds by arithmetic, kernels by name, plots, and the pages that show results."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from albatross.errors import ConfigError
from albatross.models.synth import SIZES
from bench import merge, pages, plot, profile
from bench.bounds import StepCost, step_cost

SVG = "{http://www.w3.org/2000/svg}"


def decode_result(model: str, rows: int, ms: float, target: float | None = None) -> dict[str, Any]:
    details = {"model": model, "rows": rows, "state_dtype": "float16", "ms": ms, "bound_ms": ms / 2}
    return {
        "name": f"decode {model}, {rows} rows", "value": rows / ms * 1e3, "unit": "tokens/s", "ratio": 0.5, "target": target,
        "details": details,
    }  # fmt: skip


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


def test_the_bound_of_a_large_model_counts_its_weights_once_and_its_states_twice() -> None:
    cost = step_cost(SIZES["7.2b"], 1, slot_bytes=17_301_504)
    assert cost.weight_bytes == pytest.approx(13.86e9, rel=0.01)
    assert cost.state_bytes == 2 * 17_301_504
    assert cost.flops == pytest.approx(cost.weight_bytes, rel=1e-4)  # 2 operations for each number of 2 bytes


def test_only_rows_and_states_grow_with_the_batch() -> None:
    one, many = (step_cost(SIZES["1.5b"], rows, slot_bytes=1000) for rows in (1, 101))
    assert many.weight_bytes - one.weight_bytes == 100 * SIZES["1.5b"].hidden_size * 2
    assert many.state_bytes == 101 * one.state_bytes
    assert many.flops == 101 * one.flops


def test_the_slower_of_memory_and_arithmetic_is_the_limit() -> None:
    cost = StepCost(weight_bytes=60, state_bytes=40, flops=1000)
    assert (cost.seconds(bandwidth=10, gemm_rate=1000), cost.limit(10, 1000)) == (10, "bandwidth")
    assert (cost.seconds(bandwidth=100, gemm_rate=100), cost.limit(100, 100)) == (10, "compute")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void albatross::tmix_decode_file::tmix_decode_kernel<__half, 64>(albatross::TmixParams)", "tmix_decode_kernel"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int, 4>(int*)", "CatArrayBatchedCopy"),
        ("void at::native::elementwise_kernel<128, at::A<(int)2>, f(std::pair<int, long>)>(int, long)", "elementwise_kernel"),
        ("nvjet_hsh_128x64_64x8_2x1_v_bz_TNT", "nvjet_hsh_128x64_64x8_2x1_v_bz_TNT"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ],
)
def test_kernels_are_shown_by_the_name_of_their_function(name: str, short: str) -> None:
    assert profile.short_name(name) == short


def test_calls_of_one_kernel_are_summed_over_the_steps_and_ranked() -> None:
    events = [("void a<1>(int)", 1.0), ("void a<2>(int)", 2.0), ("b", 4.0)] * profile.STEPS
    assert profile.group(events) == [("b", 1.0, 4.0), ("a", 2.0, 3.0)]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("tmix_decode_kernel", "recurrence"), ("add_norm_mix_kernel", "norm and mix"), ("linear_rows_kernel", "products"),
        ("linear_sparse_kernel", "products"), ("nvjet_hsh_128x64", "products"), ("sample_kernel", "draw"),
        ("Memcpy HtoD", "moves"), ("frobnicate", "other"),
    ],
)  # fmt: skip
def test_a_kernel_belongs_to_the_part_of_the_step_that_its_name_tells(name: str, family: str) -> None:
    assert profile.Kernel(name, 1, 1.0).family == family


def test_a_profile_holds_families_of_known_bytes_against_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [profile.Kernel("gemm", 8, 60.0), profile.Kernel("tmix_decode", 2, 30.0), profile.Kernel("add_norm", 2, 10.0)]
    monkeypatch.setattr(profile, "record", lambda step: kernels)
    cost = StepCost(weight_bytes=120_000_000, state_bytes=30_000_000, flops=1)
    results = {result.name: result for result in profile.profile_steps("t", lambda: None, cost, bandwidth=4e12)}
    assert (results["t: all products"].value, results["t: all products"].ratio) == (2000, 0.5)
    assert results["t: all recurrence"].value == 1000
    assert results["t: gemm"].details["share"] == 0.6
    assert results["t: all norm and mix"].unit == "us"


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
    assert pages.decode_table(report).splitlines() == [
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


def test_contexts_become_columns_of_the_numerics_page(report: pages.Report) -> None:
    text = pages.drift_figures([report])
    assert "| recall after tokens | 16 | 4,096 |\n| --- | --- | --- |\n| recall, fp16 state | 100 | 50 |" in text


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


def write_part(folder: Path, name: str, commit: str, **figures: float) -> Path:
    path = folder / name
    rows = [{"name": name, "value": value} for name, value in figures.items()]
    path.write_text(json.dumps({"machine": {"commit": commit, "gpus": ["H200"], "date": name}, "results": rows}))
    return path


def figures(path: Path) -> dict[str, float]:
    return {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}


def test_parts_join_a_file_of_their_commit_and_replace_what_was_measured_again(tmp_path: Path) -> None:
    out = write_part(tmp_path, "all.json", "c1", a=1.0, b=2.0)
    parts = [write_part(tmp_path, "x.json", "c1", b=3.0), write_part(tmp_path, "y.json", "c1", c=4.0)]
    merge.merge(out, parts)
    assert figures(out) == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_of_another_commit_is_replaced(tmp_path: Path) -> None:
    out = write_part(tmp_path, "all.json", "c1", a=1.0)
    merge.merge(out, [write_part(tmp_path, "x.json", "c2", b=3.0)])
    assert figures(out) == {"b": 3.0}


def test_parts_of_two_commits_are_not_joined_and_stay(tmp_path: Path) -> None:
    parts = [write_part(tmp_path, "x.json", "c1", a=1.0), write_part(tmp_path, "y.json", "c2", b=2.0)]
    with pytest.raises(ConfigError, match="c1 on H200; c2 on H200"):
        merge.merge(tmp_path / "all.json", parts)
    assert all(part.is_file() for part in parts)
    assert not (tmp_path / "all.json").exists()


@pytest.mark.parametrize("arguments", [("--skip", "everything"), ("--only",), ("--fast",)])
def test_the_gpu_check_refuses_a_part_or_option_it_does_not_have(arguments: tuple[str, ...]) -> None:
    command = ["bash", str(pages.ROOT / "ci" / "gpu_check.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_the_gpu_check_measures_with_benchmarks_that_exist() -> None:
    script = (pages.ROOT / "ci" / "gpu_check.sh").read_text()
    parts = set(re.findall(r"^ *measure (\w+)", script, re.MULTILINE))
    listed = re.search(r'^all="(.+)"', script, re.MULTILINE)
    assert listed is not None
    assert parts | {"build", "tests", "wheel", "older"} == set(listed[1].split())
    assert {part for part in parts if not (pages.ROOT / "bench" / f"{part}.py").is_file()} == set()
