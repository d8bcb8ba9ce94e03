"""`albatross build`: what it builds for, what it shows, and what it says where it cannot build."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from build_cases import put_sources, put_tools

from albatross.build import jit
from albatross.build.toolchain import CUDA_PACKAGES, find_toolchain
from albatross.cli import build as build_command
from albatross.cli.main import main


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that the command builds with the programs that stand in, on a machine with one card."""
    tools = put_tools(tmp_path / "tools")
    root = tmp_path / "checkout"
    (root / "python" / "albatross").mkdir(parents=True)
    (root / "setup.py").touch()
    put_sources(root)
    (root / "constants.py").rename(root / "python" / "albatross" / "constants.py")
    monkeypatch.setattr(build_command, "source_root", lambda: root)
    monkeypatch.setattr(build_command, "find_toolchain", lambda: tools)
    monkeypatch.setattr(build_command, "visible_capabilities", lambda: [(9, 0)])
    return root


def run_build(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["albatross", "build", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_the_command_builds_for_the_cards_here_and_says_what_the_loader_takes(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_build(monkeypatch) == 0
    settings = json.loads((checkout / "build" / "local" / "cmake" / "configured.json").read_text())
    assert settings["ALBATROSS_ARCHS"] == "9.0"
    out, err = capsys.readouterr()
    assert re.search(r"Built .*/build/local/librwkv7_state_fwd_fp16\.so in [0-9.]+ s \(2 steps", out)
    assert "1 of 1 kernels spill registers: scale_kernel for sm_90 (scale.cu 2.5 s)." in out
    assert "The loader will take" in out
    assert "[1/2] csrc/cuda/scale.cu" in err
    assert run_build(monkeypatch) == 0
    assert "Nothing to do: " in capsys.readouterr().out


def test_the_command_shows_every_kernel_on_request(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_build(monkeypatch, "--ptxas", "--arch", "90", "-j", "1") == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  scale_kernel"))
    assert row.split() == ["scale_kernel", "sm_90", "40", "16", "12", "8", "2048"]


def test_a_debug_build_keeps_a_folder_of_its_own(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_build(monkeypatch, "--debug", "--arch", "all") == 0
    settings = json.loads((checkout / "build" / "local" / "cmake-debug" / "configured.json").read_text())
    assert (settings["CMAKE_BUILD_TYPE"], settings["ALBATROSS_ARCHS"]) == ("Debug", "")


def test_without_a_card_the_command_says_what_to_type(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_command, "visible_capabilities", lambda: [])
    assert run_build(monkeypatch) == 1
    assert "say what to build for by albatross build --arch, which may be 80 (A100), 86" in capsys.readouterr().err


def test_an_architecture_that_is_none_is_wrong_usage(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_build(monkeypatch, "--arch", "Hopper") == 2
    assert "found 'Hopper'" in capsys.readouterr().err


def test_without_nvcc_the_command_names_the_packages(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_command, "find_toolchain", find_toolchain)
    monkeypatch.setenv("CUDACXX", "/nonexistent/nvcc")
    assert run_build(monkeypatch) == 1
    assert f"run pip install {' '.join(CUDA_PACKAGES)}" in capsys.readouterr().err


def test_an_installation_that_is_no_checkout_is_told_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_command, "source_root", lambda: put_sources(tmp_path / "site" / "_source"))
    assert run_build(monkeypatch, "--arch", "90") == 1
    assert "run albatross build --jit" in capsys.readouterr().err


def test_cards_are_asked_for_without_loading_torch() -> None:
    code = "import sys; from albatross.cli.build import visible_capabilities as f; f(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_build_for_other_cards_is_used_by_its_name(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout / "my cache"))
    monkeypatch.setattr(jit, "source_root", lambda: checkout)
    monkeypatch.setattr(jit, "find_toolchain", lambda lane, glibc: put_tools(checkout / lane / glibc))
    assert run_build(monkeypatch, "--jit") == 0
    assert "To use it, set ALBATROSS_JIT=1." in capsys.readouterr().out
    (checkout / "S").rename(checkout / "used")
    assert run_build(monkeypatch, "--jit", "--arch", "80") == 0
    assert re.search(r"To use it, set ALBATROSS_LIB='.*/my cache/albatross/jit/\w+/lib.*\.so'\.", capsys.readouterr().out)
