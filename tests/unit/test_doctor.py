"""`albatross doctor` on machines that are made up: with cards, without, and without torch."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from library_cases import H200, MACHINE, STABLE
from rich.console import Console

from albatross.cli.doctor import collect_report, render_report
from albatross.models.tuning import load_tuning
from albatross.ops import _loader
from albatross.ops._driver import Card
from albatross.ops._manifest import Candidate
from albatross.ops._selection import Context

BUILD = replace(STABLE, arch=("sm_80", "sm_90"), ptx=("compute_90",), sha256="good")
CANDIDATE = Candidate("package", Path("librwkv7_state_fwd_fp16.so"), BUILD, sha256="good")
NO_CANDIDATE = Candidate("package", problem="This installation has no native library, because no nvcc was found.")
OLD_CARD = Card(1, "GTX 1080", (6, 1))


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in _loader.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def set_machine(monkeypatch: pytest.MonkeyPatch, machine: Context, *candidates: Candidate) -> None:
    monkeypatch.setattr(_loader, "current_context", lambda: machine)
    monkeypatch.setattr(_loader, "find_candidates", lambda context: candidates or (CANDIDATE,))


def shown() -> str:
    console = Console(file=io.StringIO(), width=200)
    render_report(collect_report(), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_of_this_machine_is_json() -> None:
    report = json.loads(json.dumps(collect_report()))
    assert report["native_library"]["name"] == "rwkv7_state_fwd_fp16"
    assert {"albatross", "machine", "python", "torch", "driver", "cards", "candidates", "backend", "suggestions"} <= set(report)


def test_a_machine_with_a_fitting_card_uses_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, MACHINE)
    report = collect_report()
    assert report["backend"]["auto"] == "native"
    assert report["native_library"]["archs"] == ["sm_80", "sm_90"]
    assert report["native_library"]["ptx"] == ["compute_90"]
    assert report["native_library"]["problem"] is None
    (candidate,) = report["candidates"]
    assert (candidate["origin"], candidate["path"], candidate["rejection"]) == ("package", str(CANDIDATE.path), None)
    assert report["suggestions"] == []


def test_each_card_has_a_verdict_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, replace(MACHINE, cards=(H200, OLD_CARD)))
    report = collect_report()
    assert report["backend"]["auto"] == "native"
    assert [card["rejection"] is None for card in report["cards"]] == [True, False]
    assert [card["code"] for card in report["cards"]] == ["sm_90", None]
    assert "GTX 1080, sm_61" in report["suggestions"][0]
    assert "0: NVIDIA H200, sm_90 (runs sm_90)" in shown()
    assert "1: GTX 1080, sm_61 (cannot be used)" in shown()
    assert report["workers"] == ["cuda:0"]


def test_a_machine_with_two_fitting_cards_can_have_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, replace(MACHINE, cards=(H200, replace(H200, index=1))))
    assert collect_report()["workers"] == ["cuda:0", "cuda:1"]
    assert "up to 2: cuda:0, cuda:1" in shown()


def test_a_card_without_a_library_is_refused_and_the_ways_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, MACHINE, NO_CANDIDATE)
    report = collect_report()
    assert report["backend"]["auto"] is None
    assert report["native_library"]["problem"] == NO_CANDIDATE.problem
    assert report["suggestions"] == [NO_CANDIDATE.problem, "Until then: --backend reference, or --device cpu."]
    assert "auto is refused" in shown()


def test_every_candidate_is_shown_with_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = replace(CANDIDATE, origin="local build", build=replace(BUILD, source="b" * 64))
    set_machine(monkeypatch, replace(MACHINE, source="a" * 64), stale, CANDIDATE)
    report = collect_report()
    assert [candidate["rejection"] is None for candidate in report["candidates"]] == [False, True]
    assert [text.startswith("local build: The library is stale") for text in report["suggestions"]] == [True]
    assert re.search(r"local build +The library is stale", shown())
    assert re.search(r"package +chosen *\n", shown())


def test_the_needs_of_a_library_for_one_torch_and_one_python_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    build = replace(BUILD, lane="C", torch_abi="classic", torch_min="2.11", torch_max="2.11", python_abi="cp312")
    set_machine(monkeypatch, MACHINE, replace(CANDIDATE, build=build))
    library = collect_report()["native_library"]
    assert (library["lane"], library["torch_max"], library["python_abi"]) == ("C", "2.11", "cp312")
    assert "torch 2.11, Python cp312, driver 580 or newer, linux_x86_64" in shown()


def test_a_library_that_a_start_would_build_is_said_to_be_built_then(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, MACHINE, NO_CANDIDATE, Candidate("jit"))
    report = collect_report()
    assert report["backend"]["auto"] == "native"
    assert "built at the first start" in report["backend"]["reason"]
    assert report["native_library"] == {"name": "rwkv7_state_fwd_fp16", "path": None, "problem": None}
    assert report["workers"] == ["cuda:0"]
    assert re.search(r"jit +chosen: it is built at the first start", shown())


def test_the_variables_that_steer_the_choice_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBATROSS_LIB", "/elsewhere/lib.so")
    set_machine(monkeypatch, MACHINE)
    assert collect_report()["environment"] == {"ALBATROSS_LIB": "/elsewhere/lib.so"}
    assert "ALBATROSS_LIB=/elsewhere/lib.so" in shown()


def test_a_card_beside_a_cpu_build_of_torch_is_said_to_lie_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, replace(MACHINE, torch_version="2.13.0+cpu", torch_cuda=None))
    report = collect_report()
    assert report["backend"]["auto"] == "reference"
    assert "NVIDIA H200 lies idle" in report["suggestions"][0]


def test_a_machine_without_a_gpu_runs_on_the_cpu_and_has_nothing_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, replace(MACHINE, driver_cuda=None, cards=()))
    report = collect_report()
    assert report["backend"] == {"auto": "reference", "reason": "No CUDA card is visible, so models run on the CPU."}
    assert report["suggestions"] == []
    assert "no GPU" in shown()


def test_the_kernels_of_a_card_follow_its_architecture_until_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, MACHINE)
    (choices,) = collect_report()["kernel_choices"]
    assert (choices["card"], choices["defaults"], choices["num_measured"]) == (0, "sm_90", 0)
    assert choices["rules"] == [rule._asdict() for rule in load_tuning(H200.name, H200.capability, "good").defaults.rules]
    assert f"measured: 0 in {choices['cache']}" in shown()


def test_measured_kernels_are_shown_by_matrix_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = load_tuning(H200.name, H200.capability, "good")
    times = {"rows": 1.0, "cublas": 2.0}
    for rows in (1, 8, 128, 960):
        tuning.measure(4096, 1024, rows, tuple(times), lambda name, rows=rows: times[name] if rows < 100 else 3 - times[name])
    tuning.save()
    set_machine(monkeypatch, MACHINE)
    assert collect_report()["kernel_choices"][0]["measured"] == {
        "4096x1024": {"1": "rows", "8": "rows", "128": "cublas", "960": "cublas"}
    }
    assert "4096x1024 measured  rows to 8, cublas to 960" in shown()


def test_a_card_that_cannot_be_used_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, replace(MACHINE, cards=(H200, OLD_CARD)))
    assert [choices["card"] for choices in collect_report()["kernel_choices"]] == [0]


def test_a_path_in_brackets_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, MACHINE, replace(CANDIDATE, path=Path("/data [1]/模型/lib.so")))
    assert "/data [1]/模型/lib.so" in shown()


def test_without_torch_the_report_says_so_and_is_still_shown() -> None:
    code = "import sys; sys.modules['torch'] = None; import albatross.__main__ as m; m.render_report(m.collect_report())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "torch is not installed" in done.stdout
