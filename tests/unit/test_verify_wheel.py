"""The checks of finished wheels: what each of them refuses, that a good wheel passes all, and what becomes evidence."""

import json
import math
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import known_answer
import pytest
import rebuild
import torch
import torch_envs
import verify_wheel
import wheel_checks
from evidence import read_checks
from torch_envs import EnvironmentProblem, TorchEnvironment
from wheel_cases import CLASSIC, MATRIX, STABLE, define_library, make_library, make_wheel, needs_binutils
from wheel_checks import Finding
from wheel_file import Wheel

import albatross

PACKAGE = Path(albatross.__file__).parent
NATIVE = PACKAGE / "_native"
INSTALLED = next(iter(sorted(NATIVE.glob("*.so"))), None)
IS_CURRENT = INSTALLED is not None and json.loads((NATIVE / "_build.json").read_text())["schema"] == 2
needs_library = pytest.mark.skipif(not IS_CURRENT, reason="this installation has no native library (see albatross doctor)")
ENVIRONMENT = TorchEnvironment(Path(sys.executable), Path("torch"), "2.13.0+cpu", "cp311", (), ())


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    return make_wheel(tmp_path)


@pytest.mark.parametrize(
    ("symbol_tag", "libraries", "words"),
    [
        ("manylinux_2_24_x86_64", {"libtorch.so"}, None),
        ("manylinux2014_x86_64", set(), None),
        ("manylinux_2_34_x86_64", {"libtorch.so"}, "need manylinux_2_34_x86_64, but its name says manylinux_2_28_x86_64"),
        ("linux_x86_64", {"libtorch.so"}, "Its symbols need linux_x86_64"),
        ("manylinux_2_24_x86_64", {"libtorch.so", "libcudart.so.13"}, "a machine may lack: libcudart.so.13"),
    ],
)
def test_the_platform_in_the_name_must_be_true(wheel: Wheel, symbol_tag: str, libraries: set[str], words: str | None) -> None:
    problem = wheel_checks.platform_problem(wheel, symbol_tag, libraries)
    assert problem is None if words is None else words in str(problem)


def test_a_wheel_that_was_not_repaired_is_refused(wheel: Wheel) -> None:
    raw = replace(wheel, platforms=("linux_x86_64",))
    assert "repair it with auditwheel" in str(wheel_checks.platform_problem(raw, "manylinux_2_24_x86_64", set()))


@needs_binutils
def test_auditwheel_is_asked_about_the_archive(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel")
    finding = wheel_checks.check_platform(make_wheel(tmp_path, code=make_library(tmp_path / "library").read_bytes()))
    assert (finding.is_good, finding.text) == (True, "manylinux_2_5_x86_64 or later")


def test_a_wheel_must_be_one_that_the_matrix_asks_for(tmp_path: Path) -> None:
    assert wheel_checks.check_asked(make_wheel(tmp_path), MATRIX).is_good
    fewer = wheel_checks.check_asked(make_wheel(tmp_path, arch=["sm_90"]), MATRIX)
    assert "It holds compute_120, sm_90, but the matrix asks for compute_120, sm_100" in fewer.text
    assert "expected the label cu130.stable210" in wheel_checks.check_asked(make_wheel(tmp_path, label=""), MATRIX).text
    unknown = wheel_checks.check_asked(make_wheel(tmp_path, cuda={"toolkit": "11.8.89"}), MATRIX)
    assert (unknown.is_good, "The matrix has no cell" in unknown.text) == (False, True)


def test_a_wheel_of_one_torch_is_loaded_in_that_one_alone(tmp_path: Path) -> None:
    stable, classic = make_wheel(tmp_path, STABLE), make_wheel(tmp_path, CLASSIC)
    assert wheel_checks.torches_of(stable, []) == list(wheel_checks.DEFAULT_TORCHES)
    assert wheel_checks.torches_of(stable, ["2.12.1"]) == ["2.12.1"]
    assert wheel_checks.torches_of(classic, []) == ["2.11.0"]
    assert wheel_checks.torches_of(classic, ["2.12.1", "2.11.1"]) == ["2.11.1"]


@needs_binutils
def test_symbols_are_looked_for_in_each_unpacked_torch_that_the_wheel_is_for(tmp_path: Path) -> None:
    def unpack(version: str, abi: str, symbol: str) -> Path:
        torch = tmp_path / f"{version.partition('+')[0]}-{abi}" / "torch"
        define_library(torch / "lib" / "libtorch.so", [symbol])
        (torch / "version.py").write_text(f"__version__ = '{version}'\n")
        return torch

    library = make_library(tmp_path / "library")
    stable, classic = make_wheel(tmp_path, STABLE), make_wheel(tmp_path, CLASSIC)
    whole, older = unpack("2.12.1+cu130", "cp311", "aoti_torch_abi_version"), unpack("2.9.1+cu128", "cp311", "nothing")
    found = wheel_checks.check_link(stable, library, whole)
    assert found is not None
    assert (found.is_good, found.level) == (True, "link-checked")
    assert found.environment is not None
    assert (found.environment.version, found.environment.python_abi) == ("2.12.1+cu130", "cp311")
    assert wheel_checks.check_link(stable, library, older) is None
    assert wheel_checks.check_link(classic, library, whole) is None
    missing = wheel_checks.check_link(stable, library, unpack("2.10.0+cu128", "cp311", "nothing"))
    assert missing is not None
    assert "does not have: aoti_torch_abi_version" in missing.text


def test_an_environment_gets_only_what_its_torch_needs_to_open() -> None:
    requirements = (
        "filelock",
        "setuptools>=77.0.3",
        'triton~=3.8.0; platform_system == "Linux"',
        "cuda-bindings<14,>=13.0.3",
        "cuda-toolkit[cublas,cudart,cusolver,nvtx]==13.0.3",
        "nvidia-cudnn-cu13==9.24.0.43",
        "nvidia-cusolver-cu12==11.7.1.2",
        "old-thing; python_version < '3.9'",
        'pyyaml; extra == "pyyaml"',
    )
    needed = torch_envs.needed_packages(replace(ENVIRONMENT, requirements=requirements))
    assert needed == ["filelock", "cuda-toolkit[cublas,cudart]==13.0.3", "nvidia-cudnn-cu13==9.24.0.43"]


def test_an_interpreter_that_is_missing_is_named() -> None:
    with pytest.raises(EnvironmentProblem, match=r"There is no Python 3\.99 on this machine: install one"):
        torch_envs.find_interpreter("cp399")


def test_the_law_in_plain_python_is_what_the_op_computes_on_the_cpu() -> None:
    assert known_answer.answer_problems("cpu") == []


@pytest.mark.parametrize("wrong", [math.nan, 1e-3])
def test_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    right = known_answer.call("cpu")
    monkeypatch.setattr(known_answer, "call", lambda device: right + wrong * torch.eye(*right.shape[1:]))
    (problem,) = known_answer.answer_problems("cpu")
    assert "of the largest known answer, expected 1e-05 at most" in problem


@pytest.fixture
def real_wheel(tmp_path: Path) -> Wheel:
    """This very package with the library it has, as a wheel."""
    assert INSTALLED is not None
    build = json.loads((NATIVE / "_build.json").read_text())
    left_out = ("_native", "demo", "__pycache__")
    paths = [path for path in PACKAGE.rglob("*.py") if not set(left_out) & set(path.parts)]
    files = {f"albatross/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in paths}
    return make_wheel(tmp_path, STABLE, INSTALLED.read_bytes(), files=files, **build)


@needs_library
@needs_binutils
@pytest.mark.slow
def test_a_real_wheel_installs_loads_and_answers_in_a_fresh_environment(real_wheel: Wheel) -> None:
    assert INSTALLED is not None
    link, load = wheel_checks.check_in_torch(real_wheel, INSTALLED, sys.executable)
    assert (link.is_good, load.is_good) == (True, True), (link.text, load.text)
    assert (link.level, load.level) == ("link-checked", "run" if torch.cuda.is_available() else "loaded")
    assert [name for name, _ in load.schemas] == real_wheel.build["ops"]


@needs_library
@pytest.mark.slow
def test_a_wheel_whose_library_was_changed_does_not_load(real_wheel: Wheel, tmp_path: Path) -> None:
    assert INSTALLED is not None
    (tmp_path / "changed").mkdir()
    build = {**real_wheel.build, "sha256": "0" * 64}
    with zipfile.ZipFile(real_wheel.path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    wheel = make_wheel(tmp_path / "changed", STABLE, INSTALLED.read_bytes(), files=files, **build)
    finding = wheel_checks.load(wheel, torch_envs.describe(Path(sys.executable)), "load")
    assert not finding.is_good
    assert "is not the file that was built" in finding.text


def test_evidence_is_the_highest_level_and_falls_with_a_failed_check(wheel: Wheel, tmp_path: Path) -> None:
    checks = tmp_path / "checks.json"
    link = Finding("link", True, "", "link-checked", ENVIRONMENT)
    load = Finding("load", True, "", "loaded", ENVIRONMENT)
    verify_wheel.note_evidence(checks, [(wheel, link), (wheel, load)], "command")
    (check,) = read_checks(checks)
    assert (check.level, check.library, check.torch, check.python) == ("loaded", wheel.library_sha256, "2.13.0+cpu", "cp311")
    verify_wheel.note_evidence(checks, [(wheel, link)], "later command")
    assert [(check.level, check.what) for check in read_checks(checks)] == [("loaded", "command")]
    verify_wheel.note_evidence(checks, [(wheel, link), (wheel, replace(load, is_good=False))], "command")
    assert read_checks(checks) == []


def test_evidence_of_other_machines_stays(wheel: Wheel, tmp_path: Path) -> None:
    checks = tmp_path / "checks.json"
    run = Finding("load", True, "", "run", ENVIRONMENT, "NVIDIA H200", "sm_90")
    verify_wheel.note_evidence(checks, [(wheel, run)], "command")
    verify_wheel.note_evidence(checks, [(wheel, Finding("load", False, "", "loaded", ENVIRONMENT))], "command")
    (check,) = read_checks(checks)
    assert (check.machine, check.arch, check.level) == ("NVIDIA H200", "sm_90", "run")


def test_schemas_must_be_the_same_in_every_torch() -> None:
    first = Finding("load", True, "", schemas=(("op", "op(Tensor x) -> ()"),))
    (same,) = wheel_checks.check_schemas([first, first])
    (other,) = wheel_checks.check_schemas([first, replace(first, schemas=(("op", "op(Tensor y) -> ()"),))])
    assert (same.is_good, other.is_good) == (True, False)


def test_a_second_build_with_other_bytes_says_which_files_differ(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "first")
    assert rebuild.compare(wheel, make_wheel(tmp_path / "second")).is_good
    other = rebuild.compare(wheel, make_wheel(tmp_path / "third", code=b"other"))
    assert not other.is_good
    assert f"albatross/_native/lib{STABLE.name}.so" in other.text


def test_the_time_of_a_wheel_is_that_of_its_files(wheel: Wheel) -> None:
    assert rebuild.archive_time(wheel.path) == 1767323046


def test_the_copy_for_a_second_build_has_all_that_the_scripts_need(tmp_path: Path) -> None:
    rebuild.copy_project(tmp_path)
    command = [sys.executable, "ci/build_matrix.py", "--list", "--only", STABLE.key]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert STABLE.key in done.stdout
    assert (tmp_path / "setup.py").is_file()


@needs_binutils
def test_the_command_shows_a_table_and_ends_with_one_where_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise EnvironmentProblem("there is no such version")

    wheel = make_wheel(tmp_path, code=make_library(tmp_path / "library").read_bytes())
    options = ["--only", "load", "--torch", "no.version", "--checks", str(tmp_path / "checks.json")]
    monkeypatch.setattr(torch_envs, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(torch_envs, "pip", refuse)
    code = verify_wheel.main([str(wheel.path), *options])
    shown = capsys.readouterr().out
    assert code == 1
    assert "BAD" in shown
    assert "There is no environment for it: there is no such version" in shown


def test_a_wheel_without_a_library_fails_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = make_wheel(tmp_path, library=None, why="no nvcc was found")
    assert verify_wheel.main([str(wheel.path), "--checks", str(tmp_path / "checks.json")]) == 1
    assert "It has none, because no nvcc was found." in capsys.readouterr().out
