"""What is read of a library's record: `_build.json` whole, damaged, older and newer, and the digest of the file."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from library_cases import put_library

from albatross.ops import _manifest
from albatross.ops._manifest import Candidate, file_digest, read_candidate

NOT_VALID = "_build.json is not a valid build record ("


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file with a correct record beside it, in a folder whose name is no easy one."""
    return put_library(tmp_path / "native [1] 模型")


def change_record(library: Path, /, **changes: Any) -> None:
    put_library(library.parent, **changes)


def record_file(library: Path) -> Path:
    return library.parent / "_build.json"


def read(library: Path, origin: str = "package") -> Candidate:
    return read_candidate(origin, library.parent)


def test_a_record_is_read_whole(library: Path) -> None:
    change_record(library, arch=["sm_80", "sm_90"], ptx=["compute_90"])
    candidate = read(library)
    assert (candidate.path, candidate.problem, candidate.sha256) == (library, None, None)
    assert candidate.build is not None
    assert candidate.build.targets == "sm_80, sm_90, PTX compute_90"
    assert (candidate.build.torch_min, candidate.build.torch_max) == ("2.10", None)


def test_a_library_may_be_named_apart_from_its_record(library: Path) -> None:
    other = library.rename(library.with_name("other.so"))
    candidate = read_candidate("ALBATROSS_LIB", library.parent, "other.so")
    assert candidate.path == other
    assert candidate.problem is None


def torch_record(**changes: Any) -> dict[str, Any]:
    return {"torch": {"abi": "stable", "min": "2.10", "max": None, "built_with": "2.13.0+cpu", **changes}}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), ".so was expected by _build.json, but does not exist: reinstall albatross-rwkv."),
        (lambda path: record_file(path).unlink(), "_build.json was expected beside the library, but does not exist: reinstall"),
        (lambda path: (record_file(path).unlink(), record_file(path).mkdir()), "cannot be read (Is a directory): give this user"),
        (lambda path: change_record(path, schema=3), "newer albatross (layout 3, but this version reads layout 2): upgrade"),
        (lambda path: change_record(path, schema=1), "older albatross (layout 1, but this version reads layout 2): rein"),
        (lambda path: change_record(path, library=None, why="no nvcc was found"), "native library, because no nvcc was found: "),
        (lambda path: record_file(path).write_text("{"), NOT_VALID),
        (lambda path: record_file(path).write_bytes(b"\xff\xfe{}"), NOT_VALID),
        (lambda path: record_file(path).write_text('["a list"]'), NOT_VALID + "it must be an object"),
        (lambda path: record_file(path).write_text("{}"), NOT_VALID + "it has no 'schema'): reinstall"),
        (lambda path: change_record(path, schema="two"), NOT_VALID + "its schema must be a number, found 'two'"),
        (lambda path: change_record(path, library="../lib.so"), NOT_VALID + "library must look like"),
        (lambda path: change_record(path, torch={}), NOT_VALID + "it has no 'abi'"),
        (lambda path: change_record(path, torch="2.10"), NOT_VALID),
        (lambda path: change_record(path, **torch_record(min="latest")), NOT_VALID + "torch.min must look like"),
        (lambda path: change_record(path, **torch_record(max=2.11)), NOT_VALID + "torch.max must look like"),
        (lambda path: change_record(path, lane="X"), NOT_VALID + "lane must look like S|C, found 'X'"),
        (lambda path: change_record(path, arch="sm_90"), NOT_VALID + "arch must be a list, found 'sm_90'"),
        (lambda path: change_record(path, arch=["Hopper"]), NOT_VALID + "arch must look like"),
        (lambda path: change_record(path, ptx=["sm_90"]), NOT_VALID + "ptx must look like"),
        (lambda path: change_record(path, ops=None), NOT_VALID + "ops must be a list, found None"),
        (lambda path: change_record(path, sha256=""), NOT_VALID + "sha256 must look like"),
        (lambda path: change_record(path, python_abi=None), NOT_VALID + "python_abi must look like"),
    ],
)
def test_a_damaged_installation_is_refused_by_what_is_wrong(damage: Callable[[Path], object], words: str, library: Path) -> None:
    damage(library)
    candidate = read(library)
    assert candidate.problem is not None
    assert words in candidate.problem, candidate.problem
    assert candidate.problem.endswith(".")
    assert "\n" not in candidate.problem
    assert candidate.build is None


@pytest.mark.parametrize(
    ("origin", "mend"),
    [
        ("package", "reinstall albatross-rwkv"),
        ("local build", "run albatross build"),
        ("jit", "delete its folder, so that it is built again"),
        ("ALBATROSS_LIB", "name another library in ALBATROSS_LIB, or unset it"),
    ],
)
def test_the_mend_fits_the_origin(origin: str, mend: str, library: Path) -> None:
    record_file(library).write_text("{}")
    assert str(read(library, origin).problem).endswith(f": {mend}.")


def test_the_digest_of_a_file_is_taken_once_until_the_file_changes(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = file_digest(library)
    assert first == hashlib.sha256(library.read_bytes()).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(_manifest.hashlib, "sha256", None)  # a second reading would fail
        assert file_digest(library) == first
    library.write_bytes(b"tampered with, and longer than before")
    assert file_digest(library) == hashlib.sha256(library.read_bytes()).hexdigest() != first
