"""The choice of the native library: contexts and candidates against verdicts, and what is read from disk."""

import ctypes
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from albatross.errors import NativeLibraryError, UnsupportedGPUError
from albatross.ops import _driver, _loader
from albatross.ops._driver import Card
from albatross.ops._loader import Build, Candidate, Context

BUILD = Build(
    version="0.1.0",
    sha256="good",
    torch_min="2.10",
    torch_built_with="2.13.0+cpu",
    cuda_toolkit="13.0.88",
    driver_min="580",
    platform="linux_x86_64",
    arch=("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    ptx=("compute_120",),
)
CANDIDATE = Candidate("package", Path("lib.so"), BUILD, sha256="good")
H200 = Card(0, "NVIDIA H200", (9, 0))
CONTEXT = Context("2.11.0+cu130", "13.0", (13, 0), (H200,), "linux_x86_64")


def card(major: int, minor: int, index: int = 0) -> Card:
    return Card(index, f"Card {major}.{minor}", (major, minor))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch_version": "2.10.0+cu128", "torch_cuda": "12.8"},  # the runtime inside needs no equal CUDA
        {"torch_version": "2.14.1", "torch_cuda": "13.0"},
        {"torch_version": "2.15.0a0+git1234", "torch_cuda": "13.2"},
        {"torch_version": "3.0.0"},
        {"driver_cuda": (13, 2)},
        {"driver_cuda": (14, 0)},
        {"cards": (card(8, 0), card(9, 0, 1))},
    ],
)
def test_a_fitting_machine_gets_the_library(changes: dict[str, Any]) -> None:
    assert _loader.select(replace(CONTEXT, **changes), [CANDIDATE]).chosen is CANDIDATE


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"torch_version": "2.9.1+cu128"}, NativeLibraryError, ("2.10 or later", "2.13.0+cpu", "is 2.9.1+cu128", "pip install")),
        ({"torch_version": "1.13.1"}, NativeLibraryError, ("is 1.13.1",)),
        ({"torch_cuda": None}, NativeLibraryError, ("torch 2.11.0+cu130 was built without CUDA", "--device cpu")),
        ({"driver_cuda": None, "cards": ()}, UnsupportedGPUError, ("No NVIDIA driver", "580")),
        ({"driver_cuda": (12, 8)}, UnsupportedGPUError, ("CUDA 13.0", "driver 580", "CUDA 12.8 at most")),
        ({"cards": ()}, UnsupportedGPUError, ("not visible", "CUDA_VISIBLE_DEVICES")),
        ({"cards": (card(6, 1),)}, UnsupportedGPUError, ("GPU 0", "Card 6.1", "sm_61", BUILD.targets, "ARCH_LIST=6.1")),
        ({"cards": (card(9, 0), card(7, 5, 1))}, UnsupportedGPUError, ("GPU 1", "sm_75")),
        ({"platform": "win_amd64"}, NativeLibraryError, ("built for linux_x86_64", "win_amd64")),
    ],
)
def test_a_machine_that_does_not_fit_is_refused_in_one_sentence(
    changes: dict[str, Any], error: type[NativeLibraryError], words: tuple[str, ...]
) -> None:
    decision = _loader.select(replace(CONTEXT, **changes), [CANDIDATE])
    assert decision.chosen is None
    refusal = decision.error()
    assert type(refusal) is error
    assert all(word in str(refusal) for word in words), str(refusal)
    assert "\n" not in str(refusal)


@pytest.mark.parametrize(
    ("capability", "arch", "ptx", "is_covered"),
    [
        ((8, 0), ("sm_80",), (), True),
        ((8, 6), ("sm_80",), (), True),  # machine code runs on later minors of its major version
        ((8, 7), ("sm_80", "sm_86"), (), True),
        ((8, 0), ("sm_86",), (), False),
        ((9, 0), ("sm_80",), (), False),
        ((9, 0), ("sm_80",), ("compute_80",), True),
        ((7, 5), ("sm_80",), ("compute_80",), False),
        ((10, 3), ("sm_100",), (), True),
        ((12, 1), ("sm_120",), (), True),
        ((11, 0), ("sm_100", "sm_120"), ("compute_120",), False),
        ((99, 0), ("sm_120",), (), False),
        ((99, 0), ("sm_120",), ("compute_120",), True),
        ((6, 1), (), (), False),
        ((9, 0), ("sm_90a",), (), True),
        ((9, 1), ("sm_90a",), ("compute_90a",), False),  # code for one architecture runs on no other
        ((10, 3), ("sm_100f",), (), True),
        ((12, 0), ("sm_100f",), ("compute_100f",), False),
    ],
)
def test_a_card_is_covered_by_machine_code_of_its_kind_or_by_older_ptx(
    capability: tuple[int, int], arch: tuple[str, ...], ptx: tuple[str, ...], is_covered: bool
) -> None:
    assert _loader.is_covered(capability, replace(BUILD, arch=arch, ptx=ptx)) is is_covered


def test_a_file_that_was_changed_is_refused() -> None:
    decision = _loader.select(CONTEXT, [replace(CANDIDATE, sha256="changed")])
    assert "not the file that was built" in str(decision.error())


def test_the_first_fitting_candidate_is_chosen_and_every_other_keeps_its_reason() -> None:
    old = replace(CANDIDATE, build=replace(BUILD, torch_min="2.99"))
    spare = replace(CANDIDATE, path=Path("spare.so"))
    decision = _loader.select(CONTEXT, [old, CANDIDATE, spare])
    assert decision.chosen is CANDIDATE
    reasons = [verdict.rejection for verdict in decision.verdicts]
    assert "torch 2.99 or later" in (reasons[0] or "")
    assert reasons[1] is None
    assert "before it" in (reasons[2] or "")


def test_no_candidate_at_all_is_an_error() -> None:
    assert _loader.select(CONTEXT, []).chosen is None


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file with a correct build record beside it."""
    path = tmp_path / "lib.so"
    path.write_bytes(b"not really a library")
    write_record(path)
    return path


def write_record(library: Path, /, **changes: Any) -> None:
    record = {
        "schema": _loader.BUILD_SCHEMA,
        "version": "0.1.0",
        "library": library.name,
        "why": None,
        "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "torch": {"min": "2.10", "built_with": "2.13.0+cpu"},
        "cuda": {"toolkit": "13.0.88", "driver_min": "580"},
        "platform": "linux_x86_64",
        "arch": ["sm_90"],
        "ptx": [],
    }
    (library.parent / "_build.json").write_text(json.dumps({**record, **changes}))


def test_a_forced_library_is_the_only_candidate(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBATROSS_LIB", str(library))
    (candidate,) = _loader.find_candidates()
    assert candidate.path == library
    assert _loader.select(CONTEXT, [candidate]).chosen is candidate


def test_a_forced_library_that_does_not_exist_is_an_error_and_nothing_else_is_tried(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALBATROSS_LIB", str(library.with_name("other.so")))
    (candidate,) = _loader.find_candidates()
    assert "other.so does not exist" in str(_loader.select(CONTEXT, [candidate]).error())


def test_without_a_forced_library_the_package_is_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALBATROSS_LIB", raising=False)
    assert [candidate.origin for candidate in _loader.find_candidates()] == ["package"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path.parent / "_build.json").unlink(), "_build.json does not exist"),
        (lambda path: (path.parent / "_build.json").write_text("{"), "not a valid build file"),
        (lambda path: (path.parent / "_build.json").write_text('["a list"]'), "not a valid build file"),
        (lambda path: write_record(path, schema=99), "layout 99"),
        (lambda path: write_record(path, torch={}), "not a valid build file"),
        (lambda path: write_record(path, library=None, why="no nvcc was found"), "no native library, because no nvcc was found"),
        (lambda path: path.write_bytes(b"tampered"), "not the file that was built"),
    ],
)
def test_a_damaged_installation_is_refused_by_what_is_wrong(
    damage: Callable[[Path], object], words: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALBATROSS_LIB", str(library))
    damage(library)
    assert words in str(_loader.select(CONTEXT, _loader.find_candidates()).error())


def test_a_library_that_does_not_open_names_both_torch_versions(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBATROSS_LIB", str(library))
    monkeypatch.setattr(_loader, "_has_cuda_ops", lambda: False)
    with pytest.raises(NativeLibraryError, match=r"built with torch 2\.13\.0\+cpu.* does not open in torch") as caught:
        _loader._open(_loader.find_candidates()[0])
    assert str(torch.__version__) in str(caught.value)


def test_only_the_card_that_is_used_is_checked(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = (card(9, 0), card(7, 5, 1))
    monkeypatch.setattr(_loader, "list_cards", lambda driver: cards)
    assert _loader.current_context(1).cards == cards[1:]
    assert _loader.current_context(0).cards == cards[:1]
    assert _loader.current_context(2).cards == ()


class FakeDriver:
    """Answers as libcuda does, for two cards and a given version."""

    def __init__(self, version: int = 13000, start: int = 0) -> None:
        self.version, self.start = version, start

    def cuInit(self, flags: int) -> int:
        return self.start

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 2
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: ctypes.c_int) -> int:
        name.value = b"Card %d" % device.value
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: ctypes.c_int) -> int:
        out._obj.value = {75: 12, 76: device.value}[attribute]
        return 0


def test_the_driver_is_asked_for_its_cuda_version_and_its_cards() -> None:
    driver: Any = FakeDriver(version=12080)
    assert _driver.supported_cuda(driver) == (12, 8)
    assert _driver.list_cards(driver) == (Card(0, "Card 0", (12, 0)), Card(1, "Card 1", (12, 1)))


def test_a_driver_that_shows_no_card_gives_none() -> None:
    driver: Any = FakeDriver(start=100)  # CUDA_ERROR_NO_DEVICE
    assert _driver.list_cards(driver) == ()


def test_a_machine_without_a_driver_has_no_version_and_no_cards() -> None:
    assert _driver.supported_cuda(None) is None
    assert _driver.list_cards(None) == ()
