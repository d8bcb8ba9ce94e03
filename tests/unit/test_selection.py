"""The choice among native libraries: machines and libraries against verdicts, and the sentence of each refusal."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from library_cases import H200, MACHINE, OPS, STABLE

from albatross.errors import NativeLibraryError, UnsupportedGPUError
from albatross.ops._driver import Card
from albatross.ops._manifest import Build, Candidate
from albatross.ops._selection import Context, Decision, select
from albatross.ops._targets import code_for, forced_target

HOPPER = replace(STABLE, arch=("sm_90",), ptx=("compute_90",))
CLASSIC = {
    torch: replace(STABLE, lane="C", torch_abi="classic", torch_min=torch, torch_max=torch, python_abi=python)
    for torch, python in (("2.11", "cp312"), ("2.14", "cp311"))
}


def library(build: Build = STABLE, origin: str = "package", **changes: Any) -> Candidate:
    return replace(Candidate(origin, Path("lib.so"), build, sha256=build.sha256), **changes)


def card(major: int, minor: int, index: int = 0) -> Card:
    return Card(index, f"Card {major}.{minor}", (major, minor))


def decide(build: Build = STABLE, **changes: Any) -> Decision:
    return select(replace(MACHINE, **changes), [library(build)])


# The rule once more, as tables: what each library serves, written down cell by cell.


class Library(NamedTuple):
    build: Build
    torches: set[str]
    pythons: set[str]
    code: dict[tuple[int, int], str]  # what the driver takes of it for a card; a card that is not here can run none of it


TORCHES = {  # version: what it was built with
    "2.7.1+cu126": "12.6",
    "2.8.0+cu128": "12.8",
    "2.9.1+cu128": "12.8",
    "2.10.0+cu128": "12.8",
    "2.11.0+cu126": "12.6",
    "2.11.0+cu130": "13.0",
    "2.12.1+rocm7.1": None,
    "2.13.0+cpu": None,
    "2.14.1+cu130": "13.0",
    "2.15.0+cu132": "13.2",
    "2.16.0a0+git1234": "13.2",
}
PYTHONS = ("cp310", "cp311", "cp312", "cp313", "cp314", "cp313t")
DRIVERS = {None: False, (12, 4): False, (12, 8): False, (13, 0): True, (13, 2): True, (14, 1): True}  # enough for toolkit 13.0?
PLATFORMS = {"linux_x86_64": True, "linux_aarch64": False, "win_amd64": False}
CARDS = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
FORCED = {None: None, "9.0": "sm_90", "sm_120": "sm_120", "86": "sm_86", "compute_90": "compute_90", "gfx90a": "nothing"}
LATE = {"2.10.0+cu128", "2.11.0+cu126", "2.11.0+cu130", "2.14.1+cu130", "2.15.0+cu132", "2.16.0a0+git1234"}
ALL_CODE = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90",
    (10, 0): "sm_100",
    (10, 3): "sm_100",
    (12, 0): "sm_120",
    (12, 1): "sm_120",
}
HOPPER_CODE = {(9, 0): "sm_90"} | dict.fromkeys([(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)], "compute_90")
LIBRARIES = {
    "stable": Library(STABLE, LATE, set(PYTHONS), ALL_CODE),
    "hopper": Library(HOPPER, LATE, set(PYTHONS), HOPPER_CODE),
    "classic 2.11": Library(CLASSIC["2.11"], {"2.11.0+cu130"}, {"cp312"}, ALL_CODE),
    "classic 2.14": Library(CLASSIC["2.14"], {"2.14.1+cu130"}, {"cp311"}, ALL_CODE),
}


def obstacles(cell: Library, machine: Context) -> Iterator[str]:
    """A phrase for everything that keeps the library from this machine."""
    (used,) = machine.cards
    code, forced = cell.code.get(used.capability), FORCED[machine.kernel_arch]
    if machine.torch_version not in cell.torches:
        yield "torch"
    if machine.python_abi not in cell.pythons:
        yield "Python"
    if not PLATFORMS[machine.platform]:
        yield "this platform"
    if not DRIVERS[machine.driver_cuda]:
        yield "driver"
    if code is None:
        yield "GPU 0"
    if forced not in (None, code):
        yield "ALBATROSS_KERNEL_ARCH"


def machines(torch: str) -> Iterator[Context]:
    hip = "7.1" if "rocm" in torch else None
    for python, driver, platform, capability, forced in itertools.product(PYTHONS, DRIVERS, PLATFORMS, CARDS, FORCED):
        if (python, forced) in (("cp312", forced), (python, None)):  # every pair but those of two rare values
            yield Context(
                "0.1.0", None, frozenset(OPS), platform, python, torch, TORCHES[torch], hip, driver, (card(*capability),), forced
            )


@pytest.mark.parametrize("torch", TORCHES)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_chosen_exactly_where_nothing_speaks_against_it(name: str, torch: str) -> None:
    cell = LIBRARIES[name]
    for machine in machines(torch):
        expected = list(obstacles(cell, machine))
        (verdict,) = select(machine, [library(cell.build)]).verdicts
        if not expected:
            assert verdict.rejection is None, (machine, verdict.rejection)
        else:
            assert verdict.rejection is not None, (machine, expected)
            assert any(word in verdict.rejection for word in expected), (machine, expected, verdict.rejection)
            assert_is_one_sentence(verdict.rejection)


def test_the_tables_hold_machines_of_either_fate() -> None:
    for cell in LIBRARIES.values():
        fates = [not list(obstacles(cell, machine)) for torch in TORCHES for machine in machines(torch)]
        assert sum(fates) >= 10
        assert len(fates) - sum(fates) > 1000


def assert_is_one_sentence(text: str) -> None:
    """A statement of what was expected and found, a colon, and what to do."""
    assert re.fullmatch(r"[^\n]+: [^\n]+[\w)']\.", text), text
    assert ". " not in text, text


# One refusal each: whom it blames and in which words.


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"torch_version": "2.9.1+cu128"}, NativeLibraryError, "2.10 or later .*2.13.0.cpu.* is 2.9.1.cu128: run pip install"),
        ({"torch_version": "1.13.1"}, NativeLibraryError, "2.10 or later .* is 1.13.1"),
        ({"torch_version": "unknown"}, NativeLibraryError, "2.10 or later .* is unknown"),
        ({"torch_cuda": None}, NativeLibraryError, "torch 2.11.0.cu130 was built without CUDA: .*--device cpu"),
        ({"torch_cuda": None, "torch_hip": "7.1"}, NativeLibraryError, "built for ROCm 7.1, .*: ask for plain torch"),
        ({"driver_cuda": None, "cards": ()}, UnsupportedGPUError, "NVIDIA driver, but none was found: install"),
        ({"driver_cuda": (12, 8)}, UnsupportedGPUError, "CUDA 13.0, .* driver 580 .* CUDA 12.8 at most: update the driver"),
        ({"cards": ()}, UnsupportedGPUError, "not visible .*: see nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ({"cards": (card(7, 5),)}, UnsupportedGPUError, "capability 8.0 or later, but GPU 0 .*sm_75.* has 7.5: use"),
        ({"cards": (card(11, 0),)}, UnsupportedGPUError, "for sm_80, .*PTX compute_120, but GPU 0 .*sm_110.*: .*--arch 11.0"),
        ({"cards": (H200, card(11, 0, 1))}, UnsupportedGPUError, r"GPU 1 \(Card 11.0, sm_110\) can run none"),
        ({"platform": "win_amd64"}, NativeLibraryError, "built for linux_x86_64, but this is win_amd64: install"),
        ({"version": "0.2.0"}, NativeLibraryError, "of albatross 0.1.0, but this is albatross 0.2.0: reinstall"),
        ({"source": "b" * 64}, NativeLibraryError, "stale, .* aaaaaaaa, .* bbbbbbbb: run albatross build"),
        ({"ops": frozenset({*OPS, "squared_relu"})}, NativeLibraryError, "lacks squared_relu: reinstall"),
        ({"kernel_arch": "Hopper"}, NativeLibraryError, "ALBATROSS_KERNEL_ARCH must look like .* but is 'Hopper': name one"),
        ({"kernel_arch": "8.0"}, NativeLibraryError, "asks for sm_80, but GPU 0 .*sm_90.* cannot run it: name sm_90, or unset"),
        ({"kernel_arch": "sm_90a"}, NativeLibraryError, "asks for sm_90a, but the library holds sm_80.*: name one"),
        ({"kernel_arch": "compute_80"}, NativeLibraryError, "asks for compute_80, but the library holds"),
    ],
)
def test_a_machine_that_does_not_fit_is_refused_in_one_sentence(
    changes: dict[str, Any], error: type[NativeLibraryError], words: str
) -> None:
    decision = decide(**changes)
    assert decision.chosen is None
    refusal = decision.error()
    assert type(refusal) is error
    assert re.search(words, str(refusal)), str(refusal)
    assert_is_one_sentence(str(refusal))


@pytest.mark.parametrize(
    ("build", "changes", "words"),
    [
        ({"name": "wkv_cuda"}, {}, "should be rwkv7_state_fwd_fp16, but its record is of wkv_cuda: reinstall"),
        ({"torch_max": "2.10"}, {}, r"torch 2.10 at most .* is 2.11.0\+cu130: .* pip install 'torch==2.10.\*'"),
        ({"torch_min": "2.12", "torch_max": "2.12"}, {}, r"torch 2.12 or later .*: .* pip install 'torch==2.12.\*'"),
        ({"torch_abi": "classic"}, {"torch_cuda": "12.6"}, "built with CUDA 13, .* with CUDA 12.6: install"),
        ({"python_abi": "cp311"}, {}, "built for Python cp311, but this is cp312: install the wheel"),
        ({"cuda_toolkit": "13.2.86", "arch": ()}, {"cards": (card(12, 0),)}, "only PTX of CUDA 13.2 for GPU 0 .*: update"),
        ({"arch": ("sm_90", "sm_90a")}, {"kernel_arch": "sm_90"}, "asks for sm_90, but the driver takes sm_90a .*: build one"),
        ({"arch": ("sm_90",), "ptx": ("compute_80",)}, {"kernel_arch": "compute_80"}, "asks for compute_80, but .* takes sm_90 "),
    ],
)
def test_a_library_that_does_not_fit_is_refused_in_one_sentence(
    build: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    text = str(decide(replace(STABLE, **build), **changes).error())
    assert re.search(words, text), text
    assert_is_one_sentence(text)


def test_a_library_of_the_stable_abi_serves_a_torch_of_another_cuda() -> None:
    assert decide(torch_version="2.10.0+cu128", torch_cuda="12.8").chosen


def test_a_library_that_was_tampered_with_is_refused() -> None:
    text = str(select(MACHINE, [library(sha256="e" * 64)]).error())
    assert re.search("lib.so is not the file that was built .*dddddddd.*eeeeeeee.*: reinstall albatross-rwkv", text)
    assert_is_one_sentence(text.removeprefix("lib.so "). capitalize())


def test_a_digest_that_was_not_taken_is_not_judged() -> None:
    assert select(MACHINE, [library(sha256=None)]).chosen


@pytest.mark.parametrize(
    ("origin", "is_held_to_the_version", "is_held_to_the_sources"),
    [("package", True, True), ("local build", False, True), ("jit", False, True), ("ALBATROSS_LIB", False, False)],
)
def test_a_library_is_held_to_what_its_origin_promises(
    origin: str, is_held_to_the_version: bool, is_held_to_the_sources: bool
) -> None:
    candidate = library(origin=origin)
    assert (select(replace(MACHINE, version="9.9.9"), [candidate]).chosen is None) is is_held_to_the_version
    assert (select(replace(MACHINE, source="b" * 64), [candidate]).chosen is None) is is_held_to_the_sources
    assert select(replace(MACHINE, source="a" * 64), [candidate]).chosen


@pytest.mark.parametrize("forced", ["sm_90", "90", "9.0", "SM_90 "])
def test_a_forced_architecture_is_found_by_each_of_its_spellings(forced: str) -> None:
    assert decide(kernel_arch=forced).chosen


def test_a_forced_architecture_passes_over_the_libraries_without_it() -> None:
    local = library(HOPPER, "local build")
    decision = select(replace(MACHINE, kernel_arch="sm_120", cards=(card(12, 0),)), [local, library()])
    assert decision.chosen == library()
    assert [verdict.candidate for verdict in decision.passed_over] == [local]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("12.1", "sm_121"),
        ("121", "sm_121"),
        ("sm_100f", "sm_100f"),
        ("9.0a", "sm_90a"),
        ("compute_8.0", "compute_80"),
        ("9", None),
        ("", None),
        ("native", None),
        ("sm_90+PTX", None),
    ],
)
def test_the_name_of_an_architecture_is_read_or_refused(text: str, target: str | None) -> None:
    assert forced_target(text) == target


@pytest.mark.parametrize(
    ("capability", "arch", "ptx", "code"),
    [
        ((8, 0), ("sm_80",), (), "sm_80"),
        ((8, 6), ("sm_80",), (), "sm_80"),  # machine code runs on later minors of its major version
        ((8, 7), ("sm_86", "sm_80"), (), "sm_86"),
        ((8, 0), ("sm_86",), (), None),
        ((9, 0), ("sm_80",), (), None),
        ((9, 0), ("sm_80",), ("compute_80",), "compute_80"),
        ((9, 0), ("sm_90",), ("compute_80",), "sm_90"),  # machine code comes before PTX
        ((12, 0), (), ("compute_80", "compute_100", "compute_90"), "compute_100"),
        ((7, 5), ("sm_80",), ("compute_80",), None),
        ((10, 3), ("sm_100",), (), "sm_100"),
        ((11, 0), ("sm_100", "sm_120"), ("compute_120",), None),
        ((99, 0), ("sm_120",), (), None),
        ((99, 0), ("sm_120",), ("compute_120",), "compute_120"),
        ((6, 1), (), (), None),
        ((9, 0), ("sm_90", "sm_90a"), (), "sm_90a"),
        ((9, 1), ("sm_90a",), ("compute_90a",), None),  # code for one architecture runs on no other
        ((10, 3), ("sm_100f",), (), "sm_100f"),
        ((12, 0), ("sm_100f",), ("compute_100f",), None),
    ],
)
def test_a_card_runs_machine_code_of_its_kind_or_older_ptx(
    capability: tuple[int, int], arch: tuple[str, ...], ptx: tuple[str, ...], code: str | None
) -> None:
    assert code_for(capability, replace(STABLE, arch=arch, ptx=ptx)) == code


def test_the_first_fitting_candidate_is_chosen_and_every_other_keeps_its_reason() -> None:
    old = library(replace(STABLE, torch_min="2.99"), "local build")
    decision = select(MACHINE, [old, library(), library(origin="jit")])
    assert decision.chosen == library()
    reasons = [verdict.rejection for verdict in decision.verdicts]
    assert "torch 2.99 or later" in (reasons[0] or "")
    assert reasons[1] is None
    assert "before it" in (reasons[2] or "")


def test_the_error_names_the_origin_of_each_refusal_and_none_twice() -> None:
    absent = Candidate("local build", problem="Nothing is there: build it.")
    assert str(select(MACHINE, [absent]).error()) == "Nothing is there: build it."
    text = str(select(replace(MACHINE, platform="win_amd64"), [absent, library(), library(origin="jit")]).error())
    assert text.startswith("local build: Nothing is there: build it. ")
    assert text.count("win_amd64") == 1


def test_a_library_that_is_absent_does_not_hide_that_the_card_is_the_trouble() -> None:
    absent = Candidate("local build", problem="Nothing is there: build it.")
    assert type(select(replace(MACHINE, cards=(card(11, 0),)), [absent, library()]).error()) is UnsupportedGPUError


def test_what_is_still_to_be_built_fits_a_machine_that_can_use_it() -> None:
    unbuilt = Candidate("jit")
    assert select(MACHINE, [unbuilt]).chosen is unbuilt
    assert select(replace(MACHINE, cards=(card(11, 0),)), [library(), unbuilt]).chosen is unbuilt


@pytest.mark.parametrize("changes", [{"torch_cuda": None}, {"driver_cuda": None}, {"cards": ()}, {"kernel_arch": "sm_80"}])
def test_nothing_is_built_for_a_machine_that_cannot_use_it(changes: dict[str, Any]) -> None:
    assert select(replace(MACHINE, **changes), [Candidate("jit")]).chosen is None


def test_no_candidate_at_all_is_an_error() -> None:
    assert select(MACHINE, []).chosen is None
