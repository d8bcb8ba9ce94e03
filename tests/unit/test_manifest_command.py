"""`albatross manifest`: what it shows, checks and lists, in a checkout and where only a wheel is installed."""

import io
import json
from dataclasses import replace
from pathlib import Path

import make_manifest as maker
import pytest
from matrix import Combination, expand
from rich.console import Console
from typer.testing import CliRunner
from wheel_cases import CLASSIC, MATRIX, STABLE, make_library, make_wheel, needs_binutils, record
from wheel_file import Wheel, sha256_of

from albatross.cli import manifest as command
from albatross.cli.main import app
from albatross.errors import NativeLibraryError

pytestmark = needs_binutils


@pytest.fixture
def wheels(tmp_path: Path) -> list[Wheel]:
    library = make_library(tmp_path / "library").read_bytes()
    return [make_wheel(tmp_path / "dist", cell, library) for cell in (STABLE, CLASSIC)]


@pytest.fixture
def native(tmp_path: Path) -> Path:
    folder = tmp_path / "native"
    folder.mkdir()
    build = record(STABLE, sha256=sha256_of(b"stand-in"))
    (folder / "_build.json").write_text(json.dumps(build))
    (folder / build["library"]).write_bytes(b"stand-in")
    return folder


@pytest.fixture
def installed(native: Path, monkeypatch: pytest.MonkeyPatch) -> command.Manifests:
    """As in an installation from a wheel: no checkout."""
    monkeypatch.setattr(command, "source_root", lambda: None)
    return command.read_manifests(native)


@pytest.fixture
def checkout(wheels: list[Wheel], native: Path, tmp_path: Path) -> command.Manifests:
    return command.Manifests(native, None, tmp_path, maker.make_manifest(MATRIX, wheels, []))


def findings(manifests: command.Manifests) -> dict[str, str | None]:
    return dict(command.verify(manifests))


def test_an_installed_library_is_verified_by_its_digest(installed: command.Manifests) -> None:
    assert findings(installed)["installed library"] is None
    (installed.native / record()["library"]).write_bytes(b"tampered")
    assert "is not the file that was built" in str(findings(installed)["installed library"])
    (installed.native / record()["library"]).unlink()
    assert "does not exist: reinstall albatross-rwkv" in str(findings(installed)["installed library"])


def test_an_installed_library_expands_to_its_architectures(installed: command.Manifests) -> None:
    rows = list(command.expand(installed))
    assert [row["arch"] for row in rows] == [*STABLE.arch, "sm_120+"]
    assert {(row["torch"], row["cuda"], row["python_abi"]) for row in rows} == {("2.10+", "13.0", "none")}


def test_a_checkout_expands_to_all_six_tuples_of_the_matrix(checkout: command.Manifests) -> None:
    rows = list(command.expand(checkout))
    assert {Combination(*(row[axis] for axis in command.AXES)) for row in rows} == set(expand(MATRIX))
    assert len(rows) == len(expand(MATRIX))
    assert all(row["wheel"] or row["why"] for row in rows)


def test_rows_can_be_asked_for_by_axis(checkout: command.Manifests, wheels: list[Wheel]) -> None:
    wanted = {"torch": "2.11", "python_abi": "cp312", "platform": "linux_x86_64", "cuda": None, "arch": "sm_90"}
    lines = [command.line_of(row) for row in command.matching(command.expand(checkout), wanted) if row["cuda"] == "13.0"]
    assert lines == [f"{MATRIX.name}  2.11  13.0  cp312  linux_x86_64  sm_90  {wheels[1].path.name} (built)"]


def test_wheels_in_dist_are_verified_by_their_digests(checkout: command.Manifests, wheels: list[Wheel]) -> None:
    assert set(findings(checkout).values()) == {None}
    wheels[0].path.write_bytes(b"changed")
    assert "is not the file that was built" in str(findings(checkout)[wheels[0].path.name])


def test_a_cell_without_wheel_and_reason_is_found(checkout: command.Manifests) -> None:
    assert checkout.wheels is not None
    checkout.wheels["cells"][0].update(wheel=None, why=None)
    assert "1 cells have neither a wheel nor a reason" in str(findings(checkout)["cells"])


def test_show_names_the_library_and_the_wheels(
    installed: command.Manifests, checkout: command.Manifests, wheels: list[Wheel]
) -> None:
    console = Console(width=250, record=True, file=io.StringIO())
    command.show(replace(checkout, record=installed.record), console)
    text = console.export_text()
    for words in ("2.10 or later (stable ABI)", "driver 580", "sm_90", "PTX compute_120", wheels[0].path.name, "2.11"):
        assert words in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"schema": 99}', "has layout 99, but this version reads layout 2: upgrade albatross-rwkv"),
        ('{"schema": 1}', "has layout 1, but this version reads layout 2: reinstall albatross-rwkv"),
        ("{", "cannot be read as a manifest"),
        ("[]", "cannot be read as a manifest"),
    ],
)
def test_a_record_that_cannot_be_understood_is_refused(
    native: Path, content: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "source_root", lambda: None)
    (native / "_build.json").write_text(content)
    with pytest.raises(NativeLibraryError, match=words):
        command.read_manifests(native)


def test_an_installation_without_a_record_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "source_root", lambda: None)
    with pytest.raises(NativeLibraryError, match=r"_build\.json does not exist: install albatross-rwkv, or run albatross build"):
        command.read_manifests(tmp_path)


def test_a_checkout_shows_its_manifest_also_without_a_library(
    wheels: list[Wheel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python" / "albatross").mkdir(parents=True)
    (tmp_path / "setup.py").touch()
    (tmp_path / "manifest").mkdir()
    (tmp_path / "manifest" / "wheels.json").write_text(maker.render(maker.make_manifest(MATRIX, wheels, [])))
    monkeypatch.setattr(command, "source_root", lambda: tmp_path)
    manifests = command.read_manifests(tmp_path / "nowhere")
    assert len(list(command.expand(manifests))) == len(expand(MATRIX))
    assert "does not exist" in str(findings(manifests)["installed library"])


def test_the_command_line_verifies_and_ends_with_one_where_something_is_wrong(
    installed: command.Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "read_manifests", lambda: installed)
    monkeypatch.setattr(command, "_file_problems", lambda: iter(()))
    good = CliRunner().invoke(app, ["manifest", "verify"])
    (installed.native / record()["library"]).write_bytes(b"tampered")
    bad = CliRunner().invoke(app, ["manifest", "verify"])
    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert "installed library: good" in good.stdout


def test_the_command_line_expands_as_json_and_as_lines(installed: command.Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "read_manifests", lambda: installed)
    rows = json.loads(CliRunner().invoke(app, ["manifest", "expand", "--arch", "sm_90", "--json"]).stdout)
    assert [row["arch"] for row in rows] == ["sm_90"]
    lines = CliRunner().invoke(app, ["manifest", "expand"]).stdout.splitlines()
    assert len(lines) == len(STABLE.arch) + 1
    shown = json.loads(CliRunner().invoke(app, ["manifest", "show", "--json"]).stdout)
    assert shown == {"installed": installed.record, "manifest": None}
