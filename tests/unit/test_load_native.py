"""What `load_native` does with a decision: it opens, builds first where ALBATROSS_JIT asks for it, or raises."""

from dataclasses import replace
from pathlib import Path

import pytest
from library_cases import MACHINE, put_library

from albatross.build.jit import Plan
from albatross.build.native import Options
from albatross.build.toolchain import BuildError, Toolchain
from albatross.errors import NativeLibraryError
from albatross.ops import _jit, _loader
from albatross.ops._driver import Card
from albatross.ops._manifest import Candidate
from albatross.ops._selection import Context

pytestmark = pytest.mark.usefixtures("package")
# Of the builder's stand-in.
TOOLS = Toolchain(Path("nvcc"), "13.0.88", Path("torch"), "2.11.0+cu130", Path("cmake"), Path("ninja"))


@pytest.fixture
def asked(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """ALBATROSS_JIT is set, the package has nothing for the card, and a builder makes what it is asked for; returns that."""
    monkeypatch.setenv("ALBATROSS_JIT", "1")
    put_library(package.parent, arch=["sm_80"])
    wanted: list[Options] = []

    def make_plan(options: Options) -> Plan:
        return Plan(tmp_path, TOOLS, options, tmp_path / "cache" / f"{options.archs}{options.ptx_only}")

    def build_cached(plan: Plan, listener: object) -> Path:
        wanted.append(plan.options)
        number = plan.options.archs.replace(".", "").removesuffix("+PTX")
        targets = {"arch": [], "ptx": [f"compute_{number}"]} if plan.options.ptx_only else {"arch": [f"sm_{number}"]}
        put_library(plan.folder, **targets)
        return plan.folder

    monkeypatch.setattr(_jit, "make_plan", make_plan)
    monkeypatch.setattr(_jit, "build_cached", build_cached)
    monkeypatch.setattr(_loader, "open_library", lambda candidate: candidate)
    return wanted


def load(monkeypatch: pytest.MonkeyPatch, machine: Context = MACHINE) -> Candidate:
    monkeypatch.setattr(_loader, "current_context", lambda index=None: machine)
    return _loader._load_for_card.__wrapped__(0)  # type: ignore[return-value]


def test_nothing_is_built_unless_asked(asked: list[Options], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALBATROSS_JIT")
    with pytest.raises(NativeLibraryError, match="can run none of it"):
        load(monkeypatch)
    assert asked == []


def test_a_library_is_built_for_the_card_where_none_fits_and_found_from_then_on(
    asked: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = load(monkeypatch)
    assert (opened.origin, opened.sha256 is None) == ("jit", False)
    assert load(monkeypatch) == opened
    assert asked == [Options("9.0")]


def test_nothing_is_built_where_a_library_fits(asked: list[Options], monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, replace(MACHINE, cards=(Card(0, "A100", (8, 0)),))).origin == "package"
    assert asked == []


def test_deciding_builds_nothing_but_says_what_would_be(asked: list[Options]) -> None:
    assert _loader.decide(MACHINE).chosen == Candidate("jit")
    assert asked == []


@pytest.mark.parametrize(
    ("forced", "options"),
    [("sm_90", Options("9.0")), ("compute_90", Options("9.0+PTX", ptx_only=True)), ("9.0a", Options("9.0a"))],
)
def test_a_forced_architecture_is_what_is_built(
    forced: str, options: Options, asked: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(monkeypatch, replace(MACHINE, kernel_arch=forced)).origin == "jit"
    assert asked == [options]


def test_what_is_missing_for_a_build_is_said_beside_the_other_refusals(
    asked: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_plan(options: Options) -> Plan:
        raise BuildError("No nvcc was found: install a CUDA toolkit.")

    monkeypatch.setattr(_jit, "make_plan", make_plan)
    with pytest.raises(NativeLibraryError, match=r"package: .*none of it.* jit: No nvcc was found: install a CUDA toolkit\."):
        load(monkeypatch)


def test_a_build_that_fails_is_the_error(asked: list[Options], monkeypatch: pytest.MonkeyPatch) -> None:
    def build_cached(plan: Plan, listener: object) -> Path:
        raise BuildError("sampling.cu does not compile: see build.log.")

    monkeypatch.setattr(_jit, "build_cached", build_cached)
    with pytest.raises(NativeLibraryError, match="does not compile"):
        load(monkeypatch)


def test_a_library_that_is_passed_over_is_told_in_the_log(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_library(checkout / "build" / "local", source="b" * 64)
    monkeypatch.setattr(_loader, "open_library", lambda candidate: candidate)
    assert load(monkeypatch, replace(MACHINE, source="a" * 64)).origin == "package"
    (line,) = caplog.messages
    assert "passed over. local build: The library is stale" in line
