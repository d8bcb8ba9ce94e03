"""manifest/wheels.json: made from wheels alone, and an answer for every six-tuple."""

import itertools
import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_manifest as maker
import pytest
from evidence import CHECKS, Check, read_checks, write_checks
from matrix import Combination, expand, read_matrix
from wheel_cases import CLASSIC, MATRIX, STABLE, make_library, make_wheel, needs_binutils, record
from wheel_file import Wheel, WheelError, sha256_of

DIST = maker.ROOT / "dist"
COMMITTED: dict[str, Any] | None = json.loads(maker.MANIFEST.read_text()) if maker.MANIFEST.is_file() else None
LISTED = [DIST / wheel["file"] for wheel in COMMITTED["wheels"]] if COMMITTED else []
pytestmark = needs_binutils


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_library(tmp_path_factory.mktemp("library")).read_bytes()


@pytest.fixture
def wheels(tmp_path: Path, library: bytes) -> list[Wheel]:
    return [make_wheel(tmp_path / "dist", cell, library) for cell in (STABLE, CLASSIC)]


def check(wheel: Wheel, **changes: Any) -> Check:
    assert wheel.library_sha256 is not None
    loaded = Check(wheel.library_sha256, "2.13.0+cpu", "cp311", "cpu", None, "loaded", "2026-11-30", "python ci/verify_wheel.py")
    return replace(loaded, **changes)


def six_tuples(manifest: dict[str, Any]) -> dict[Combination, dict[str, Any]]:
    """Every six-tuple of the manifest with its cell. Fails where two cells are about the same one."""
    found: dict[Combination, dict[str, Any]] = {}
    for cell in manifest["cells"]:
        for values in itertools.product(*(cell[axis] for axis in maker.AXES)):
            assert Combination(*values) not in found, f"{values} stands in two cells"
            found[Combination(*values)] = cell
    return found


def assert_is_complete(manifest: dict[str, Any]) -> None:
    """Each six-tuple of the matrix, and no other, has a wheel that is listed or a reason that is a sentence."""
    answers = six_tuples(manifest)
    assert answers.keys() == set(expand(MATRIX))
    files = {wheel["file"] for wheel in manifest["wheels"]}
    for wanted, cell in answers.items():
        if cell["wheel"] is None:
            assert cell["level"] == "not-built"
            assert len(cell["why"]) > 20, wanted
        else:
            assert cell["wheel"] in files
            assert cell["why"] is None
            assert cell["level"] != "not-built"


def test_what_a_wheel_is_comes_from_its_file(wheels: list[Wheel]) -> None:
    entry = maker.make_manifest(MATRIX, wheels, [])["wheels"][1]
    assert entry["cell"] == STABLE.key
    assert (entry["file"], entry["sha256"], entry["size_bytes"]) == (wheels[0].path.name, wheels[0].sha256, wheels[0].size_bytes)
    assert entry["library"]["sha256"] == sha256_of_library(wheels[0])
    assert (entry["platform"], entry["requires_python"]) == ("manylinux_2_28_x86_64", ">=3.10")
    build = record(STABLE)
    for field in ("name", "lane", "torch", "cuda", "python_abi", "arch", "ptx", "ops", "source"):
        assert entry[field] == build[field]
    assert (entry["level"], entry["checks"]) == ("built", [])


def sha256_of_library(wheel: Wheel) -> str:
    with zipfile.ZipFile(wheel.path) as archive:
        return sha256_of(archive.read(f"albatross/_native/{wheel.build['library']}"))


def test_every_six_tuple_has_a_wheel_or_a_reason(wheels: list[Wheel]) -> None:
    manifest = maker.make_manifest(MATRIX, wheels, [])
    assert_is_complete(manifest)
    answers = six_tuples(manifest)
    name, platform = MATRIX.name, "linux_x86_64"
    assert answers[Combination(name, "2.11", "13.0", "none", platform, "sm_90")]["wheel"] == wheels[0].path.name
    assert answers[Combination(name, "2.11", "13.0", "cp312", platform, "sm_90")]["wheel"] == wheels[1].path.name
    assert answers[Combination(name, "2.14", "13.0", "cp311", platform, "sm_80")]["wheel"] == wheels[0].path.name
    assert "no nvcc" in answers[Combination(name, "2.8", "12.8", "cp312", platform, "sm_90")]["why"]


def test_without_wheels_every_six_tuple_has_a_reason() -> None:
    manifest = maker.make_manifest(MATRIX, [], [])
    assert_is_complete(manifest)
    assert not [cell for cell in manifest["cells"] if cell["wheel"]]


def test_the_same_wheels_give_the_same_manifest_and_changed_ones_another(
    wheels: list[Wheel], tmp_path: Path, library: bytes
) -> None:
    text = maker.render(maker.make_manifest(MATRIX, wheels, []))
    again, _ = maker.collect(MATRIX, tmp_path / "dist")
    assert maker.render(maker.make_manifest(MATRIX, again, [])) == text
    assert json.loads(text) == maker.make_manifest(MATRIX, wheels, [])
    changed = [make_wheel(tmp_path / "dist", STABLE, library, source="6" * 64), wheels[1]]
    assert maker.render(maker.make_manifest(MATRIX, changed, [])) != text


def test_a_level_is_that_of_the_torch_it_was_seen_in(wheels: list[Wheel]) -> None:
    checks = [
        check(wheels[0]),
        check(wheels[0], torch="2.11.0+cu130", machine="NVIDIA H200", arch="sm_90", level="run"),
        check(wheels[0], torch="2.14.1+cu130", level="link-checked"),
        check(wheels[0], library="another", torch="2.12.0+cu130", level="run"),
    ]
    manifest = maker.make_manifest(MATRIX, wheels, checks)
    answers = six_tuples(manifest)
    levels = {
        ("2.13", "13.0", "sm_90"): "loaded",
        ("2.13", "13.2", "sm_90"): "loaded",
        ("2.11", "13.0", "sm_90"): "run",
        ("2.11", "13.0", "sm_80"): "loaded",
        ("2.14", "13.0", "sm_80"): "link-checked",
        ("2.12", "13.0", "sm_90"): "built",
    }
    for (torch, cuda, arch), level in levels.items():
        assert answers[Combination(MATRIX.name, torch, cuda, "none", "linux_x86_64", arch)]["level"] == level
    stable = next(wheel for wheel in manifest["wheels"] if wheel["cell"] == STABLE.key)
    assert stable["level"] == "run"
    assert [entry["torch"] for entry in stable["checks"]] == [check.torch for check in checks[:3]]


def test_checks_of_other_bytes_are_no_evidence(wheels: list[Wheel]) -> None:
    manifest = maker.make_manifest(MATRIX, wheels, [check(wheels[0], library="0" * 64, level="run")])
    assert {wheel["level"] for wheel in manifest["wheels"]} == {"built"}


def test_two_wheels_for_one_cell_are_refused(wheels: list[Wheel], tmp_path: Path, library: bytes) -> None:
    other = make_wheel(tmp_path / "other", STABLE, library, version="0.2.0")
    with pytest.raises(WheelError, match=f"are both the wheel {STABLE.key}: remove one"):
        maker.make_manifest(MATRIX, [*wheels, other], [])


def test_a_library_with_other_code_than_its_record_says_is_refused(tmp_path: Path) -> None:
    library = make_library(tmp_path, targets=["sm_90"]).read_bytes()
    with pytest.raises(WheelError, match="does not hold the library that its record tells of"):
        maker.make_manifest(MATRIX, [make_wheel(tmp_path, STABLE, library)], [])


def test_wheels_that_are_not_of_the_matrix_are_left_out_with_a_note(tmp_path: Path, library: bytes) -> None:
    make_wheel(tmp_path, STABLE, library, label="")
    make_wheel(tmp_path, CLASSIC, library, library=None, why="no nvcc was found")
    wheels, notes = maker.collect(MATRIX, tmp_path)
    assert not wheels
    assert ["without the label" in note or "no library, because no nvcc was found" in note for note in notes] == [True, True]


def test_the_command_writes_what_it_then_finds_to_be_as_made(
    wheels: list[Wheel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, checks = tmp_path / "wheels.json", tmp_path / "checks.json"
    write_checks(checks, [check(wheels[0])])
    options = ["make_manifest", "--dist", str(tmp_path / "dist"), "--out", str(out), "--checks", str(checks)]
    monkeypatch.setattr(sys, "argv", options)
    assert maker.main() == 0
    monkeypatch.setattr(sys, "argv", [*options, "--check"])
    assert maker.main() == 0
    write_checks(checks, [check(wheels[0], level="run")])
    assert maker.main() == 1
    assert "outdated: run python ci/make_manifest.py" in capsys.readouterr().out


@pytest.mark.skipif(COMMITTED is None, reason="this working copy has no manifest/wheels.json")
def test_the_committed_manifest_answers_every_six_tuple_of_the_matrix() -> None:
    assert COMMITTED is not None
    assert_is_complete(COMMITTED)


@pytest.mark.skipif(not LISTED or not all(path.is_file() for path in LISTED), reason="dist/ has not all wheels of the manifest")
def test_the_committed_manifest_is_what_the_wheels_in_dist_say() -> None:
    wheels, _ = maker.collect(MATRIX, DIST)
    assert maker.render(maker.make_manifest(read_matrix(), wheels, read_checks(CHECKS))) == maker.MANIFEST.read_text()
