"""The checks of a built library: symbols, needed libraries and machine code, on small ELF files and on the real library."""

from pathlib import Path

import check_library
import pytest
from matrix import Cell
from wheel_cases import CLASSIC, STABLE, define_library, make_library, needs_binutils, record

import albatross

NATIVE = Path(albatross.__file__).parent / "_native"
INSTALLED = next(iter(sorted(NATIVE.glob("*.so"))), None)
CPP = "_ZN2at4_ops5zeros4callEv"


@pytest.fixture
def no_cuobjdump(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's tool refuses the empty code of stand-ins."""
    monkeypatch.setattr(check_library, "find_cuobjdump", lambda: None)


@needs_binutils
@pytest.mark.usefixtures("no_cuobjdump")
@pytest.mark.parametrize(
    ("cell", "symbols", "needed"),
    [
        (STABLE, ["aoti_torch_abi_version", "torch_call_dispatcher"], ["libtorch.so"]),
        (CLASSIC, [CPP, "PyModule_Create2"], ["libtorch.so", "libc10.so", "libtorch_python.so"]),
    ],
)
def test_a_library_that_wants_what_its_lane_may_is_good(
    tmp_path: Path, cell: Cell, symbols: list[str], needed: list[str]
) -> None:
    library = make_library(tmp_path, symbols, needed=needed)
    assert check_library.symbol_problems(library, record(cell)) == []
    assert check_library.code_problems(library, record(cell)) == []


@needs_binutils
@pytest.mark.parametrize(
    ("cell", "symbols", "needed", "words"),
    [
        (STABLE, ["aoti_torch_abi_version", CPP], ["libtorch.so"], f"tie it to one torch, Python or CUDA: {CPP}"),
        (STABLE, ["aoti_torch_abi_version", "_ZNK3c1010TensorImpl3dimEv"], ["libtorch.so"], "tie it to one torch"),
        (STABLE, ["aoti_torch_abi_version", "PyErr_Clear"], ["libtorch.so"], "PyErr_Clear"),
        (STABLE, ["aoti_torch_abi_version", "cudaMalloc"], ["libtorch.so"], "cudaMalloc"),
        (STABLE, ["aoti_torch_abi_version"], ["libtorch.so", "libcudart.so.13"], "a machine may lack: libcudart.so.13"),
        (STABLE, ["aoti_torch_abi_version"], ["libtorch.so", "libc10.so"], "a machine may lack: libc10.so"),
        (STABLE, ["aoti_torch_abi_version"], ["libdl.so.2"], "does not need libtorch.so"),
        (STABLE, ["memcpy"], ["libtorch.so"], "uses nothing of torch's stable ABI"),
        (CLASSIC, [CPP, "cudaMalloc"], ["libtorch.so"], "cudaMalloc"),
        (CLASSIC, ["aoti_torch_abi_version"], ["libtorch.so"], "uses nothing of torch's C++ ABI"),
    ],
)
def test_a_library_that_wants_more_is_refused(
    tmp_path: Path, cell: Cell, symbols: list[str], needed: list[str], words: str
) -> None:
    problems = " ".join(check_library.symbol_problems(make_library(tmp_path, symbols, needed=needed), record(cell)))
    assert words in problems


@needs_binutils
def test_symbols_that_a_torch_does_not_have_are_named(tmp_path: Path) -> None:
    library = make_library(tmp_path, ["aoti_torch_a", "aoti_torch_b", "memcpy"], weak=["aoti_torch_weak"])
    define_library(tmp_path / "whole" / "lib" / "libtorch.so", ["aoti_torch_a"])
    define_library(tmp_path / "whole" / "lib" / "libtorch_cpu.so", ["aoti_torch_b"])
    define_library(tmp_path / "older" / "lib" / "libtorch.so", ["aoti_torch_a"])
    assert check_library.torch_problems(library, tmp_path / "whole") == []
    (problem,) = check_library.torch_problems(library, tmp_path / "older")
    assert problem.endswith("does not have: aoti_torch_b.")


@needs_binutils
@pytest.mark.usefixtures("no_cuobjdump")
def test_code_that_the_record_does_not_tell_of_is_refused(tmp_path: Path) -> None:
    library = make_library(tmp_path, targets=["sm_90"])
    (problem,) = check_library.code_problems(library, record(arch=["sm_90"], ptx=["compute_90"]))
    assert problem == "It holds code for sm_90, but _build.json says compute_90, sm_90."


@needs_binutils
def test_a_tool_that_sees_other_code_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "cuobjdump"
    elf, ptx = "ELF file 1: a.1.sm_80.cubin", "PTX file 1: a.1.sm_90.ptx"
    tool.write_text(f'#!/bin/sh\ncase $1 in --list-elf) echo "{elf}";; *) echo "{ptx}";; esac\n')
    tool.chmod(0o755)
    monkeypatch.setattr(check_library, "find_cuobjdump", lambda: str(tool))
    library = make_library(tmp_path, targets=["sm_90"])
    (problem,) = check_library.code_problems(library, record(arch=["sm_90"], ptx=[]))
    assert problem == "It holds code for sm_90, but cuobjdump says compute_90, sm_80."


@needs_binutils
@pytest.mark.skipif(INSTALLED is None, reason="this installation has no native library (see albatross doctor)")
@pytest.mark.skipif(check_library.find_cuobjdump() is None, reason="cuobjdump is not installed")
def test_both_ways_to_read_the_code_of_a_real_library_agree() -> None:
    assert INSTALLED is not None
    tool = str(check_library.find_cuobjdump())
    assert check_library.cuobjdump_targets(tool, INSTALLED) == check_library.code_targets(INSTALLED)


def test_a_folder_of_the_machine_that_built_it_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\0torch/csrc/stable/library.h\0csrc/bindings.cpp\0/proc/cpuinfo\0")
    assert check_library.path_problems(library) == []
    library.write_bytes(b"\0/home/me/torch/include/torch/csrc/stable/library.h\0")
    assert "/home/me/torch/include/torch/csrc/stable/library.h" in " ".join(check_library.path_problems(library))
