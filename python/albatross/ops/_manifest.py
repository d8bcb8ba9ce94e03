"""Reads what a built library says of itself: the `_build.json` beside it, which is the wheel's part of the manifest.

Knows nothing of the machine and judges nothing but whether a record can be understood. `albatross.build.native` writes the
records, `_loader` says where they lie, `_selection` judges what is read here.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

LIBRARY_NAME = "rwkv7_state_fwd_fp16"
RECORD_FILE = "_build.json"
SCHEMA = 2  # version of the record's layout
FORCED, LOCAL, PACKAGE, JIT = "ALBATROSS_LIB", "local build", "package", "jit"  # origins, in the order they are considered


@dataclass(frozen=True, slots=True)
class Build:
    """What one built library says of itself. Times and paths of the build are not in it."""

    name: str
    version: str  # of the package it was built for
    lane: str  # "S": LibTorch's stable ABI; "C": the C++ ABI of one torch, and one Python
    platform: str  # as in "linux_x86_64"
    torch_abi: str
    torch_min: str
    torch_max: str | None
    torch_built_with: str
    cuda_toolkit: str
    driver_min: str
    python_abi: str  # as in "cp312", or "none" for a library without a symbol of Python
    arch: tuple[str, ...]  # ("sm_80", ...): machine code
    ptx: tuple[str, ...]  # ("compute_120",): code the driver compiles for later cards
    ops: tuple[str, ...]
    source: str  # digest of the sources, as `albatross.build.sources.source_digest` makes it
    sha256: str  # of the library file

    @property
    def targets(self) -> str:
        return ", ".join([*self.arch, *(f"PTX {name}" for name in self.ptx)])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A library that might be used. `problem` says why it cannot be, whatever the machine; then `build` may be None.

    Without a problem and without a build it is one that `load_native` makes when it is chosen.
    """

    origin: str
    path: Path | None = None
    build: Build | None = None
    sha256: str | None = None  # of the file as it is; None: not taken
    problem: str | None = None


def mend_of(origin: str) -> str:
    """What helps against a damaged or outdated library of this origin."""
    if origin == FORCED:
        return f"name another library in {FORCED}, or unset it"
    mends = {LOCAL: "run albatross build", JIT: "delete its folder, so that it is built again"}
    return mends.get(origin, "reinstall albatross-rwkv")


def read_candidate(origin: str, folder: Path, file_name: str | None = None) -> Candidate:
    """The library that `folder`'s record describes; `file_name` overrides the file's name given there. Reads no library."""
    record = folder / RECORD_FILE
    try:
        content = json.loads(record.read_bytes())
        problem = _layout_problem(record, content, origin)
        if problem is not None:
            return Candidate(origin, problem=problem)
        if content["library"] is None:
            return Candidate(origin, problem=_absence(content["why"]))
        path = folder / (file_name or _text(content, "library", r"[\w.-]+"))
        build = parse_build(content)
    except FileNotFoundError:
        return Candidate(origin, problem=f"{record} was expected beside the library, but does not exist: {mend_of(origin)}.")
    except OSError as error:
        text = f"{record} cannot be read ({error.strerror}): give this user the right to read it, or {mend_of(origin)}."
        return Candidate(origin, problem=text)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        return Candidate(origin, problem=f"{record} is not a valid build record ({reason}): {mend_of(origin)}.")
    if not path.is_file():
        return Candidate(origin, problem=f"{path} was expected by {RECORD_FILE}, but does not exist: {mend_of(origin)}.")
    return Candidate(origin, path, build)


def _layout_problem(record: Path, content: Any, origin: str) -> str | None:
    if not isinstance(content, dict):
        raise ValueError("it must be an object of JSON")
    schema = content["schema"]
    if schema == SCHEMA:
        return None
    if not isinstance(schema, int):
        raise ValueError(f"its schema must be a number, found {schema!r}")
    text = f"layout {schema}, but this version reads layout {SCHEMA}"
    if schema > SCHEMA:
        return f"{record} was made by a newer albatross ({text}): upgrade albatross-rwkv."
    return f"{record} was made by an older albatross ({text}): {mend_of(origin)}."


def _absence(why: str) -> str:
    return (
        f"This installation has no native library, because {why}: install a wheel that has it, or install torch and nvcc and "
        "then albatross-rwkv from source."
    )


_VERSION = r"\d+\.\d+(\.\d+)*"
_DIGEST = r"[0-9a-f]{64}"


def parse_build(content: dict[str, Any]) -> Build:
    """A record of layout SCHEMA that has a library. Raises KeyError, TypeError or ValueError where it is malformed."""
    return Build(
        name=_text(content, "name", r"\w+"),
        version=_text(content, "version", r"\S+"),
        lane=_text(content, "lane", "S|C"),
        platform=_text(content, "platform", r"\w+"),
        torch_abi=_text(content, "torch.abi", "stable|classic"),
        torch_min=_text(content, "torch.min", _VERSION),
        torch_max=None if content["torch"]["max"] is None else _text(content, "torch.max", _VERSION),
        torch_built_with=_text(content, "torch.built_with", rf"{_VERSION}\S*"),
        cuda_toolkit=_text(content, "cuda.toolkit", _VERSION),
        driver_min=_text(content, "cuda.driver_min", r"\d+(\.\d+)*"),
        python_abi=_text(content, "python_abi", r"none|cp\d+t?"),
        arch=_texts(content, "arch", r"sm_\d{2,3}[af]?"),
        ptx=_texts(content, "ptx", r"compute_\d{2,3}[af]?"),
        ops=_texts(content, "ops", r"\w+"),
        source=_text(content, "source", _DIGEST),
        sha256=_text(content, "sha256", _DIGEST),
    )


def _text(content: dict[str, Any], place: str, pattern: str) -> str:
    """The text at `place` ("torch.min"), which the whole pattern must match."""
    value: Any = content
    for key in place.split("."):
        value = value[key]
    return _matching(value, place, pattern)


def _texts(content: dict[str, Any], place: str, pattern: str) -> tuple[str, ...]:
    if not isinstance(content[place], list):
        raise ValueError(f"{place} must be a list, found {content[place]!r}")
    return tuple(_matching(value, place, pattern) for value in content[place])


def _matching(value: object, place: str, pattern: str) -> str:
    if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
        raise ValueError(f"{place} must look like {pattern}, found {value!r}")
    return value


def file_digest(path: Path) -> str:
    """SHA-256 of a file, taken once a process unless the file changes. Raises OSError."""
    stat = path.stat()
    return _digest(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _digest(path: Path, inode: int, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 18):
            digest.update(chunk)
    return digest.hexdigest()
