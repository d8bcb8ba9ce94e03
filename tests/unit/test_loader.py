"""Where the loader looks for a native library, in which order, and that looking changes nothing."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from library_cases import H200, MACHINE, put_library

import albatross
from albatross.build import sources
from albatross.ops import _loader
from albatross.ops._driver import Card
from albatross.ops._selection import Decision

pytestmark = pytest.mark.usefixtures("package")
DECISION_LIMIT_S = 0.005
# What this machine may lack of one that fits the libraries below.
FITTING: dict[str, Any] = {
    name: getattr(MACHINE, name) for name in ("version", "ops", "platform", "torch_cuda", "torch_hip", "driver_cuda", "cards")
}


def origins(decision: Decision) -> list[str]:
    return [verdict.candidate.origin for verdict in decision.verdicts]


def test_an_installation_has_one_candidate_its_own(package: Path) -> None:
    decision = _loader.decide(MACHINE)
    assert origins(decision) == ["package"]
    assert decision.chosen is not None
    assert decision.chosen.path == package


def test_a_local_build_comes_before_the_package(checkout: Path) -> None:
    local = put_library(checkout / "build" / "local")
    decision = _loader.decide(replace(MACHINE, source="a" * 64))
    assert origins(decision) == ["local build", "package"]
    assert decision.chosen is not None
    assert decision.chosen.path == local


def test_a_checkout_without_a_local_build_uses_the_package_if_it_is_of_the_same_sources(checkout: Path, package: Path) -> None:
    decision = _loader.decide(replace(MACHINE, source="a" * 64))
    assert decision.chosen is not None
    assert decision.chosen.path == package
    assert "has no library in" in str(decision.verdicts[0].rejection)
    assert decision.passed_over == ()


def test_after_a_change_of_the_sources_both_libraries_of_a_checkout_are_stale(checkout: Path) -> None:
    put_library(checkout / "build" / "local")
    decision = _loader.decide(replace(MACHINE, source="b" * 64))
    assert decision.chosen is None
    assert [str(verdict.rejection).endswith(": run albatross build.") for verdict in decision.verdicts] == [True, True]


def test_the_context_has_the_digest_of_a_checkout_and_none_elsewhere(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "source_digest", lambda root: f"digest of {root.name}")
    assert _loader.current_context().source == "digest of checkout"
    monkeypatch.setattr(sources, "is_checkout", lambda folder: False)
    assert _loader.current_context().source is None


def test_the_context_is_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBATROSS_KERNEL_ARCH", "9.0")
    context = _loader.current_context()
    assert context.version == albatross.__version__
    assert context.torch_version == torch.__version__
    assert context.python_abi.startswith("cp3")
    assert {"sample", "wkv7_prefill"} <= context.ops
    assert context.kernel_arch == "9.0"


def test_only_the_card_that_is_used_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = (H200, Card(1, "RTX 3090", (8, 6)))
    monkeypatch.setattr(_loader, "list_cards", lambda driver: cards)
    assert _loader.current_context().cards == cards
    assert _loader.current_context(1).cards == cards[1:]
    assert _loader.current_context(0).cards == cards[:1]
    assert _loader.current_context(2).cards == ()


def test_of_two_cards_of_different_kind_the_one_without_code_is_named() -> None:
    cards = (H200, Card(1, "RTX 3090", (8, 6)))
    decision = _loader.decide(replace(MACHINE, cards=cards))
    assert "GPU 1 (RTX 3090, sm_86) can run none of it" in str(decision.error())
    assert _loader.decide(replace(MACHINE, cards=cards[:1])).chosen is not None


def test_a_forced_library_is_the_only_candidate(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = put_library(tmp_path / "other", version="9.9.9")
    monkeypatch.setenv("ALBATROSS_LIB", str(forced))
    monkeypatch.setenv("ALBATROSS_JIT", "1")
    decision = _loader.decide(replace(MACHINE, source="b" * 64))
    assert origins(decision) == ["ALBATROSS_LIB"]
    assert decision.chosen is not None
    assert decision.chosen.path == forced


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"arch": ["sm_80"]}, "can run none of it"), ({"sha256": "b" * 64}, "is not the file"), ({"schema": 3}, "newer albatross")],
)
def test_a_forced_library_that_does_not_fit_is_an_error_and_nothing_else_is_tried(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALBATROSS_LIB", str(put_library(tmp_path / "other", **changes)))
    decision = _loader.decide(MACHINE)
    assert origins(decision) == ["ALBATROSS_LIB"]
    assert words in str(decision.error())


def test_a_forced_library_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBATROSS_LIB", str(tmp_path / "none.so"))
    text = str(_loader.decide(MACHINE).error())
    assert text.startswith(f"ALBATROSS_LIB should name a library, but {tmp_path / 'none.so'} is no file: ")


def test_a_tampered_library_is_refused(package: Path) -> None:
    package.write_bytes(b"Not really a library")
    assert f"{package} is not the file that was built" in str(_loader.decide(MACHINE).error())


def test_a_library_that_cannot_be_read_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def file_digest(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(_loader, "file_digest", file_digest)
    assert str(_loader.decide(MACHINE).error()) == f"{package} cannot be read (Permission denied): reinstall albatross-rwkv."


def test_no_digest_is_taken_of_a_library_that_does_not_fit_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loader, "file_digest", None)  # a call would fail
    assert "is 2.9.1" in str(_loader.decide(replace(MACHINE, torch_version="2.9.1")).error())


def test_a_decision_takes_less_than_five_milliseconds(package: Path) -> None:
    """Beyond the digest of the library, which is taken once a process."""
    put_library(package.parent, bytes(8 << 20))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        decision = _loader.decide(replace(_loader.current_context(), **FITTING))
        times.append(time.perf_counter() - start)
        assert decision.chosen is not None
    assert min(times) < DECISION_LIMIT_S


def test_looking_for_a_library_writes_nothing(tmp_path: Path) -> None:
    """So that an installation may lie in a folder that nobody can write."""
    code = """
import os, sys, torch
seen = []
def hook(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and args[0] != os.devnull:
        seen.append(str(args[0]))
    if event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.chmod", "os.truncate"):
        seen.append(f"{event} {args[0]}")
sys.addaudithook(hook)
import albatross.ops
from albatross.ops import _loader
from albatross.cli.doctor import collect_report
decision = _loader.decide(_loader.current_context())
collect_report()
open(os.environ["PROOF"], "w").close()
print(seen)
"""
    proof = tmp_path / "proof"
    environment = {**os.environ, "PROOF": str(proof), "PYTHONDONTWRITEBYTECODE": "1", "ALBATROSS_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([str(proof)])
