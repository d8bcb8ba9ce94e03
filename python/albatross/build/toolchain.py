"""Finds what a native build needs, and says of each missing piece how to get it.

Knows nothing of the sources and starts nothing but the tools' own `--version`. Never imports torch: its folder is found by
path, also under build isolation, where another environment is aimed at than runs. Called by setup.py, `jit` and
`albatross build`.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from albatross.errors import NativeLibraryError

LANES = ("S", "C")  # LibTorch's stable ABI; the classic ABI with pybind11, for one torch and one Python
TORCH_MIN = {"S": (2, 10), "C": (2, 7)}  # the first with the whole stable ABI; the oldest that manifest/matrix.toml wants
CMAKE_MIN = (3, 24)
# A whole toolkit of CUDA 13.0, whose machine code and PTX the oldest driver of CUDA 13 takes. CUDA 12 has no nvcc there.
CUDA_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)


class BuildError(NativeLibraryError):
    """The native library cannot be built: a piece is missing, a source does not compile, or a folder cannot be written."""


class Missing(NamedTuple):
    """A piece that was not found, or not as it must be: its name, a clause that says so, and what to do."""

    name: str
    reason: str
    mend: str

    def __str__(self) -> str:
        return f"{self.reason[0].upper()}{self.reason[1:]}: {self.mend}."


class ToolchainError(BuildError):
    """Pieces are missing; the text has a sentence for each."""

    def __init__(self, missing: Sequence[Missing]) -> None:
        super().__init__(" ".join(map(str, missing)))
        self.missing = tuple(missing)


class Toolchain(NamedTuple):
    """What a native build uses."""

    nvcc: Path
    toolkit: str  # version of nvcc, "13.0.88"
    torch: Path  # folder of the package
    torch_version: str  # "2.13.0+cpu"
    cmake: Path
    ninja: Path
    zig: str = ""  # command that links for an older glibc, as a list of CMake; empty: not asked for
    python_include: str = ""  # lane C only, as the next
    pybind11_include: str = ""


def find_toolchain(lane: str = "S", glibc: str = "") -> Toolchain:
    """The nearest of each piece. Raises ToolchainError for all that are missing at once, BuildError where a variable is wrong."""
    if lane not in LANES:
        raise BuildError(f"A lane must be one of {' and '.join(LANES)}, found {lane!r}: set ALBATROSS_LANE to one of them.")
    if not sys.platform.startswith("linux"):
        reason = f"the native library is built on Linux only, not on {sys.platform}"
        raise ToolchainError([Missing("Linux", reason, "use WSL 2, or plain torch (--backend reference)")])
    nvcc, torch, cmake, ninja = _find_nvcc(), _find_torch(lane), _find_cmake(), _find_ninja()
    compiler, zig, headers = _find_compiler(), _find_zig(glibc), _find_headers(lane)
    if (
        isinstance(nvcc, Missing)
        or isinstance(torch, Missing)
        or isinstance(cmake, Missing)
        or isinstance(ninja, Missing)
        or isinstance(compiler, Missing)
        or isinstance(zig, Missing)
        or isinstance(headers, Missing)
    ):
        pieces = (nvcc, torch, cmake, ninja, compiler, zig, headers)
        raise ToolchainError([piece for piece in pieces if isinstance(piece, Missing)])
    return Toolchain(*nvcc, *torch, cmake, ninja, zig, *headers)


def _find_nvcc() -> tuple[Path, str] | Missing:
    packaged = [folder / "nvidia" / "cu13" / "bin" / "nvcc" for folder in site_folders()]
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = [os.environ["CUDACXX"]] if os.environ.get("CUDACXX") else [f"{home}/bin/nvcc" for home in homes]
    found = next(filter(None, map(shutil.which, named or ["nvcc", *map(str, packaged), "/usr/local/cuda/bin/nvcc"])), None)
    mend = f"install a CUDA toolkit, or run pip install {' '.join(CUDA_PACKAGES)}"
    if found is None:
        locked = next((path for path in packaged if path.is_file()), None)
        if locked and not named:
            programs = f"{locked.parent}/* {locked.parents[1] / 'nvvm' / 'bin' / 'cicc'}"
            return Missing("nvcc", f"{locked} may not be run", f"run chmod a+x {programs}")
        places = f"CUDACXX or CUDA_HOME names {named[0]}" if named else "looked at CUDACXX, CUDA_HOME, PATH and the packages"
        return Missing("nvcc", f"no nvcc was found ({places})", mend)
    version = re.search(r"V(\d+\.\d+\.\d+)", _version_text(found))
    return (Path(found), version[1]) if version else Missing("nvcc", f"{found} --version does not answer as nvcc does", mend)


def _find_torch(lane: str) -> tuple[Path, str] | Missing:
    named = os.environ.get("ALBATROSS_TORCH_DIR")
    if named and torch_version(Path(named)) is None:
        raise BuildError(f"ALBATROSS_TORCH_DIR must name the folder of a torch package, but {named} is none.")
    for folder in [Path(named)] if named else [folder / "torch" for folder in site_folders()]:
        version = torch_version(folder)
        if version and release(version) >= TORCH_MIN[lane]:
            return folder, version
    wanted = "{}.{}".format(*TORCH_MIN[lane])
    reason = f"no torch {wanted} or later was found (ALBATROSS_TORCH_DIR names one)"
    return Missing("torch", reason, f"run pip install 'torch>={wanted}'")


def _find_cmake() -> Path | Missing:
    wanted = "{}.{}".format(*CMAKE_MIN)
    found = next((path for path in _find_programs("cmake") if release(_version_text(path)) >= CMAKE_MIN), None)
    if found is None:
        return Missing("cmake", f"no cmake {wanted} or later was found", f"run pip install 'cmake>={wanted}'")
    return Path(found)


def _find_ninja() -> Path | Missing:
    found = next(_find_programs("ninja"), None)
    return Path(found) if found else Missing("ninja", "no ninja was found", "run pip install ninja")


def _find_compiler() -> str | Missing:
    """The C++ compiler that CMake will find."""
    found = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return found or Missing("g++", "no C++ compiler was found (looked at CXX and PATH)", "install g++ (apt-get install g++)")


def _find_zig(glibc: str) -> str | Missing:
    if not glibc:
        return ""
    if any((folder / "ziglang").is_dir() for folder in site_folders()):
        return f"{sys.executable};-m;ziglang"
    return Missing("ziglang", f"no ziglang was found, which links for glibc {glibc}", "run pip install ziglang")


def _find_headers(lane: str) -> tuple[str, str] | Missing:
    if lane == "S":
        return "", ""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        return Missing("Python.h", f"no Python.h was found in {python}", "install Python's headers, such as python3-dev")
    folders = (folder / "pybind11" / "include" for folder in site_folders())
    pybind11 = next((folder for folder in folders if (folder / "pybind11" / "pybind11.h").is_file()), None)
    return (str(python), str(pybind11)) if pybind11 else Missing("pybind11", "no pybind11 was found", "run pip install pybind11")


def _find_programs(name: str) -> Iterator[str]:
    """On PATH, then beside this Python, whose environment may not be active."""
    yield from filter(None, (shutil.which(name), shutil.which(name, path=sysconfig.get_path("scripts"))))


def _version_text(program: str) -> str:
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace", timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def site_folders() -> Iterator[Path]:
    """Where packages may lie, nearest first. Under build isolation only the later ones name the environment aimed at."""
    yield from (Path(path) for path in sys.path if path)
    yield from (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    bins = [Path(path) for path in os.get_exec_path() if shutil.which("python3", path=path)]
    active = [Path(os.environ["VIRTUAL_ENV"])] if os.environ.get("VIRTUAL_ENV") else []
    for prefix in [*active, *(folder.parent for folder in bins)]:
        yield from sorted(prefix.glob("lib*/python3*/site-packages"), reverse=True)


def torch_version(folder: Path) -> str | None:
    """The version of the torch package in `folder`, None if there is none."""
    try:
        found = re.search(r"__version__ = '(.+)'", (folder / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def release(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu", of "cmake version 3.25.1" (3, 25)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
