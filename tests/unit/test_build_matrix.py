"""ci/build_matrix.py: what is built, kept and refused, and what a failure leaves. A script stands in for compiler and tools."""

import os
import re
from pathlib import Path

import build_cell
import build_matrix
import pytest
from build_inputs import InputProblem
from matrix import Machine, Matrix, read_matrix, registry_machine

STABLE = "S-cu130-linux_x86_64"
EXACT = "C-torch2.11-cu130-cp312-linux_x86_64"
OTHER = "C-torch2.13-cu130-cp311-linux_x86_64"
# Called as `python -c CODE` to make a wheel of the variables it was given, and as `python repair_wheel.py WHEEL --dest FOLDER`.
TOOL = """#!/bin/sh
if [ "$1" = -c ]; then
  echo "[1/2] one.cu"
  if grep -qx "$ALBATROSS_VERSION_LABEL" "$(dirname "$0")/broken" 2>/dev/null; then echo "error: no such kernel"; exit 3; fi
  mkdir dist
  env | grep -E '^(ALBATROSS_|TORCH_|CUDA|CXX|MAX_JOBS|SOURCE_DATE)' > "dist/lib-1+$ALBATROSS_VERSION_LABEL.whl"
  cat csrc/ops.h >> "dist/lib-1+$ALBATROSS_VERSION_LABEL.whl"
else
  mkdir "$4" && cp "$2" "$4"
fi
"""


class StandIns:
    """What `Inputs` gives, from a folder of stand-ins."""

    folder = Path()

    def __init__(self, matrix: Matrix) -> None:
        self._machine = registry_machine(matrix)

    def machine(self) -> Machine:
        return self._machine

    def compilers(self, cuda: str) -> str:
        return (self.folder / "compilers").read_text()

    def nvcc(self, cuda: str) -> Path:
        return self.folder / f"nvcc-{cuda}"

    def torch(self, version: str) -> Path:
        if (self.folder / f"no-torch-{version}").exists():
            raise InputProblem(f"torch {version} could not be had")
        return self.folder / f"torch-{version}"

    def python(self, python_abi: str) -> Path:
        return self.folder / "python"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of few files whose cells are "built" in a moment by `tools/python`; `tools/broken` lists labels that fail."""
    root = tmp_path / "project"
    for name in (*build_cell.SOURCE_FILES, "csrc/ops.h", "python/albatross/__init__.py", "server/app.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python").write_text(TOOL)
    (tools / "python").chmod(0o755)
    (tools / "compilers").write_text("13.0.88")
    monkeypatch.setattr(StandIns, "folder", tools)
    monkeypatch.setattr(build_matrix, "Inputs", StandIns)
    for name, value in {"ROOT": root, "DIST": root / "dist", "NOTES": root / "build" / "matrix"}.items():
        monkeypatch.setattr(build_cell, name, value)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.chdir(root)
    return root


def wheel(project: Path, label: str) -> Path:
    return project / "dist" / f"lib-1+{label}.whl"


def states(output: str) -> dict[str, str]:
    """The state of each cell that has a line of its own in the table."""
    return dict(re.findall(r"│ (\S+)\s+│ (\w[\w ]*\w)\s+│", output))


def test_a_run_builds_the_default_cells_and_accounts_for_all_others(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_matrix.main([]) == 0
    output = capsys.readouterr().out
    found = states(output)
    assert {key for key, state in found.items() if state == "built"} == {STABLE, EXACT, OTHER}
    assert len(list((project / "dist").iterdir())) == 3
    groups = [int(number) for number in re.findall(r"^│ [^│]*\((\d+)\)\s+│", output, re.MULTILINE)]
    assert len(found) + sum(groups) == len(read_matrix().cells)
    assert "No torch 2.7 for CUDA 13.0 is known." in output


def test_a_build_is_told_all_of_its_cell_and_nothing_of_the_user_s_flags(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXXFLAGS", "-O0")
    monkeypatch.setenv("ALBATROSS_PTX_ONLY", "1")
    assert build_matrix.main(["--only", EXACT]) == 0
    lines = wheel(project, "cu130.torch211").read_text().splitlines()
    told = dict(line.split("=", 1) for line in lines if "=" in line)
    tools = StandIns.folder
    assert int(told.pop("MAX_JOBS")) >= 1
    assert told == {
        "ALBATROSS_LANE": "C",
        "ALBATROSS_VERSION_LABEL": "cu130.torch211",
        "ALBATROSS_GLIBC": "2.28",
        "ALBATROSS_TORCH_DIR": str(tools / "torch-2.11"),
        "CUDACXX": str(tools / "nvcc-13.0"),
        "TORCH_CUDA_ARCH_LIST": "8.0;8.6;8.9;9.0;10.0;12.0+PTX",
        "SOURCE_DATE_EPOCH": "1700000000",
    }


def test_lane_s_is_compiled_with_the_headers_that_the_matrix_names(project: Path) -> None:
    assert build_matrix.main(["--only", STABLE]) == 0
    text = wheel(project, "cu130.stable210").read_text()
    assert f"ALBATROSS_TORCH_DIR={StandIns.folder / 'torch-2.13'}\n" in text
    assert "ALBATROSS_LANE=S\n" in text


def test_a_second_run_keeps_what_has_not_changed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_matrix.main([])
    before = {path: path.stat().st_mtime_ns for path in (project / "dist").iterdir()}
    capsys.readouterr()
    assert build_matrix.main([]) == 0
    found = states(capsys.readouterr().out)
    assert {found[key] for key in (STABLE, EXACT, OTHER)} == {"kept"}
    assert {path: path.stat().st_mtime_ns for path in (project / "dist").iterdir()} == before


def test_a_changed_source_is_built_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_matrix.main(["--only", EXACT])
    (project / "csrc" / "ops.h").write_text("changed\n")
    capsys.readouterr()
    assert build_matrix.main(["--only", EXACT]) == 0
    assert states(capsys.readouterr().out)[EXACT] == "built"
    assert "changed" in wheel(project, "cu130.torch211").read_text()


def test_another_compiler_builds_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_matrix.main(["--only", EXACT])
    (StandIns.folder / "compilers").write_text("13.0.99")
    capsys.readouterr()
    assert build_matrix.main(["--only", EXACT]) == 0
    assert states(capsys.readouterr().out)[EXACT] == "built"


def test_a_wheel_that_was_tampered_with_is_built_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_matrix.main(["--only", EXACT])
    good = wheel(project, "cu130.torch211").read_text()
    wheel(project, "cu130.torch211").write_text("other")
    capsys.readouterr()
    assert build_matrix.main(["--only", EXACT]) == 0
    assert states(capsys.readouterr().out)[EXACT] == "built"
    assert wheel(project, "cu130.torch211").read_text() == good


def test_a_failed_cell_fails_the_run_names_its_log_and_leaves_no_wheel(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_matrix.main([]) == 0
    (project / "csrc" / "ops.h").write_text("changed\n")
    (StandIns.folder / "broken").write_text("cu130.torch211\n")
    capsys.readouterr()
    assert build_matrix.main([]) == 1
    output = capsys.readouterr().out
    assert {key: states(output)[key] for key in (STABLE, EXACT, OTHER)} == {STABLE: "built", EXACT: "failed", OTHER: "built"}
    assert f"setup.py ended with code 3; its log is build/matrix/{EXACT}.log" in output
    assert "error: no such kernel" in (project / "build" / "matrix" / f"{EXACT}.log").read_text()
    assert not wheel(project, "cu130.torch211").exists()


def test_a_failed_cell_is_tried_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (StandIns.folder / "broken").write_text("cu130.torch211\n")
    assert build_matrix.main(["--only", EXACT]) == 1
    (StandIns.folder / "broken").unlink()
    assert build_matrix.main(["--only", EXACT]) == 0


def test_an_input_that_cannot_be_had_fails_its_cells_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (StandIns.folder / "no-torch-2.11").touch()
    assert build_matrix.main([]) == 1
    output = capsys.readouterr().out
    assert (states(output)[EXACT], states(output)[OTHER]) == ("failed", "built")
    assert "torch 2.11 could not be had" in output


def test_cells_built_at_once_have_working_copies_of_their_own(project: Path) -> None:
    assert build_matrix.main(["--jobs", "3"]) == 0
    assert {path.name for path in (project / "build" / "matrix").iterdir() if path.is_dir()} <= {f"cu130-{i}" for i in range(3)}
    assert len(list((project / "dist").iterdir())) == 3


def test_a_pattern_names_cells_that_are_not_built_otherwise(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_matrix.main(["--only", "C-torch2.9-cu130-cp31[23]-linux_x86_64"]) == 0
    assert set(states(capsys.readouterr().out).values()) == {"built"}
    assert wheel(project, "cu130.torch29").is_file()


def test_a_cell_that_is_named_and_refused_fails_with_the_reason(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_matrix.main(["--only", "S-cu128-linux_x86_64"]) == 1
    output = capsys.readouterr().out
    assert states(output) == {"S-cu128-linux_x86_64": "refused"}
    assert "There is no nvcc 12.8 on PATH" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "S-cu99"], "the matrix has no cell like S-cu99: --list names them all"),
        (["--jobs", "0"], "--jobs must be at least 1, found 0"),
    ],
)
def test_an_argument_that_means_nothing_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        build_matrix.main(arguments)
    assert message in capsys.readouterr().err


def test_the_list_names_every_cell_and_builds_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_matrix.main(["--list"]) == 0
    found = states(capsys.readouterr().out)
    assert found.keys() == read_matrix().cells.keys()
    assert [key for key, state in found.items() if state == "can be built"] == [STABLE, EXACT, OTHER]
    assert not (project / "dist").exists()


def test_a_mirrored_source_keeps_its_time_until_it_changes(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    build_cell.mirror_sources(copy)
    (copy / "csrc" / "gone.cu").touch()
    for path in (copy / "csrc" / "ops.h", copy / "server" / "app.py"):
        os.utime(path, (1, 1))
    (project / "csrc" / "ops.h").write_text("changed\n")
    (project / "python" / "albatross" / "_native").mkdir()
    (project / "python" / "albatross" / "_native" / "_build.json").write_text("of another build")
    build_cell.mirror_sources(copy)
    assert (copy / "server" / "app.py").stat().st_mtime == 1
    assert (copy / "csrc" / "ops.h").read_text() == "changed\n"
    assert not (copy / "csrc" / "gone.cu").exists()
    assert not (copy / "python" / "albatross" / "_native").exists()
