"""Compiles the native library with CMake and ninja, and puts it with its record into a folder, at once or not at all.

`CMakeLists.txt` has all flags; this file gives it the tools and the options, follows ninja, and writes the record that
`albatross.ops._manifest` reads. It knows no environment variable and no user: setup.py, `jit` and `albatross build` call it.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from albatross import __version__
from albatross.build import resources
from albatross.build.sources import listed_ops, source_digest
from albatross.build.toolchain import BuildError, Toolchain, release

LIBRARY_NAME = "rwkv7_state_fwd_fp16"
RECORD_FILE = "_build.json"
SCHEMA = 2  # layout of the record
LOG_FILE = "build.log"  # in the build folder: all that CMake and the compilers said
_ERROR = re.compile(r"\berror\b|\bfatal\b", re.IGNORECASE)
_STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")
# What CMake and the compilers read of the environment beside what is set for them here.
_COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CUDAFLAGS", "CUDAHOSTCXX", "LDFLAGS", "NVCC_APPEND_FLAGS")
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How to build. All but `jobs` change the library."""

    archs: str = ""  # as normalize_archs gives them, "8.0;9.0+PTX"; empty: all that a wheel has
    lane: str = "S"
    glibc: str = ""  # oldest glibc to run with, as in "2.28"; empty: that of this machine
    ptx_only: bool = False  # where PTX is built, leave out the machine code of the same architecture
    is_debug: bool = False  # symbols, and no optimisation on the device either
    jobs: int = 0  # compilers at once; 0: one a core


class Listener:
    """Hears how a build goes on. This one lets it pass; a subclass shows it."""

    def step(self, done: int, total: int, text: str) -> None:
        """A file was compiled or linked."""

    def message(self, line: str) -> None:
        """A compiler said something."""


def normalize_archs(text: str) -> str:
    """ "8.0;9.0+PTX" of "90+PTX,80" and of "sm_80 9.0+PTX": sorted, each once. Raises BuildError for anything else."""
    has_ptx: dict[tuple[int, int, str], bool] = {}
    for arch in filter(None, re.split(r"[ ,;]+", text)):
        found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)([af]?)(\+ptx)?", arch.lower())
        if found is None:
            raise BuildError(f"An architecture must look like 9.0, 9.0a or 9.0+PTX, found {arch!r}.")
        key = (int(found[1]), int(found[2]), found[3])
        has_ptx[key] = has_ptx.get(key, False) or found[4] is not None
    return ";".join(f"{key[0]}.{key[1]}{key[2]}{'+PTX' if has_ptx[key] else ''}" for key in sorted(has_ptx))


def archs_of(capabilities: Iterable[tuple[int, int]]) -> str:
    """The architectures of cards of these compute capabilities, for `Options.archs`."""
    return normalize_archs(" ".join(f"{major}.{minor}" for major, minor in capabilities))


def platform_name() -> str:
    return re.sub(r"[-.]", "_", sysconfig.get_platform())


@contextmanager
def writing(mend: str) -> Iterator[None]:
    """Turns a refusal of the file system within the block into a BuildError that ends with `mend`."""
    try:
        yield
    except OSError as error:
        raise BuildError(f"{error.filename or 'A file'} cannot be written ({error.strerror or error}): {mend}.") from error


def compile_library(
    toolchain: Toolchain, root: Path, build_folder: Path, target: Path, options: Options, listener: Listener | None = None
) -> Record:
    """Build the sources in `root` and put library and record into `target`; returns the record.

    `build_folder` is CMake's, and is gone on with if it was made the same way. Raises BuildError with the first error of the
    compiler, and OSError where a folder cannot be written.
    """
    source = source_digest(root)  # of what is compiled: a file that is saved meanwhile makes the library stale
    build_folder.mkdir(parents=True, exist_ok=True)
    _configure(toolchain, root, build_folder, options)
    _compile(toolchain, root, build_folder, options, listener or Listener())
    info = json.loads((build_folder / "build_info.json").read_bytes())
    library = (build_folder / info["library"]).read_bytes()
    torch_minor = "{}.{}".format(*release(toolchain.torch_version))
    is_stable = options.lane == "S"
    record = {
        **record_head(options.lane),
        "library": info["library"],
        "torch": {
            "abi": "stable" if is_stable else "classic",
            "min": info["stable_min"] if is_stable else torch_minor,
            "max": None if is_stable else torch_minor,
            "built_with": toolchain.torch_version,
        },
        "cuda": info["cuda"],
        "python_abi": "none" if is_stable else python_abi(),
        "arch": info["arch"],
        "ptx": info["ptx"],
        "ops": listed_ops(root),
        "source": source,
        "sha256": hashlib.sha256(library).hexdigest(),
        "why": None,
    }
    write_library(target, record, library)
    return record


def record_head(lane: str) -> Record:
    return {"schema": SCHEMA, "name": LIBRARY_NAME, "version": __version__, "lane": lane, "platform": platform_name()}


def python_abi() -> str:
    """As in the tag of a wheel: "cp312", "cp314t" for a Python without the lock."""
    return f"cp{sys.version_info[0]}{sys.version_info[1]}{'t' if sysconfig.get_config_var('Py_GIL_DISABLED') else ''}"


def write_library(target: Path, record: Record, library: bytes | None = None) -> None:
    """Put the library and its record into `target`, each at once, and remove what another build left there."""
    target.mkdir(parents=True, exist_ok=True)
    for other in target.glob(f"*{LIBRARY_NAME}*.so"):
        if other.name != record["library"]:
            other.unlink()
    if library is not None:
        _replace(target / record["library"], library)
    _replace(target / RECORD_FILE, (json.dumps(record, indent=2) + "\n").encode())


def _replace(path: Path, content: bytes) -> None:
    """Leaves a file that has the content already as it is: a process may have it open."""
    if path.is_file() and path.read_bytes() == content:
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def _configure(toolchain: Toolchain, root: Path, folder: Path, options: Options) -> None:
    """Run CMake, unless it ran in `folder` with the same settings. A change of CMakeLists.txt itself is seen by ninja."""
    settings = _settings(toolchain, options)
    inherited = {name: os.environ.get(name) for name in _COMPILER_VARIABLES}
    state = json.dumps({"root": str(root), "cmake": str(toolchain.cmake), **settings, "environment": inherited}, indent=2)
    done = folder / "configured.json"
    if (folder / "build.ninja").is_file() and done.is_file() and done.read_text(encoding="utf-8") == state:
        return
    _check_archs(toolchain, options.archs)
    done.unlink(missing_ok=True)
    # The paths of an isolated environment in CMake's cache would be gone at the next build. What was compiled stays (so no
    # --fresh): ninja compiles again what the settings change, for another torch or Python the C++ files alone.
    (folder / "CMakeCache.txt").unlink(missing_ok=True)
    for compilers in folder.glob("CMakeFiles/[0-9]*"):
        shutil.rmtree(compilers)
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    command: list[str | Path] = [toolchain.cmake, "-G", "Ninja", "-S", root, "-B", folder, *definitions]
    ran = subprocess.run(command, env=_environment(toolchain), capture_output=True, text=True, encoding="utf-8", errors="replace")
    (folder / LOG_FILE).write_text(ran.stdout + ran.stderr, encoding="utf-8")
    if ran.returncode != 0:
        raise BuildError(_cmake_error(ran.stderr, folder / LOG_FILE))
    done.write_text(state, encoding="utf-8")


def _settings(toolchain: Toolchain, options: Options) -> dict[str, str]:
    is_classic = options.lane == "C"
    return {
        "CMAKE_BUILD_TYPE": "Debug" if options.is_debug else "Release",
        "CMAKE_CUDA_COMPILER": str(toolchain.nvcc),
        "CMAKE_MAKE_PROGRAM": str(toolchain.ninja),
        "TORCH_DIR": str(toolchain.torch),
        "ALBATROSS_LANE": options.lane,
        "ALBATROSS_ARCHS": options.archs,
        "ALBATROSS_PTX_ONLY": "ON" if options.ptx_only else "OFF",
        "ALBATROSS_GLIBC": options.glibc,
        "ALBATROSS_ZIG": toolchain.zig,
        "ALBATROSS_PYTHON_INCLUDE": toolchain.python_include,
        "ALBATROSS_PYBIND11_INCLUDE": toolchain.pybind11_include,
        "ALBATROSS_EXT_SUFFIX": str(sysconfig.get_config_var("EXT_SUFFIX")) if is_classic else "",
    }


def _environment(toolchain: Toolchain) -> dict[str, str]:
    # The toolkit's packages keep in lib/ what nvcc looks for in lib64/.
    library_path = [str(toolchain.nvcc.parents[1] / "lib"), *filter(None, [os.environ.get("LIBRARY_PATH")])]
    return {**os.environ, "LIBRARY_PATH": ":".join(library_path), "LC_ALL": "C.UTF-8", "NINJA_STATUS": "[%f/%t] "}


def _check_archs(toolchain: Toolchain, archs: str) -> None:
    listed = subprocess.run([toolchain.nvcc, "--list-gpu-code"], capture_output=True, text=True, errors="replace").stdout
    known = re.findall(r"\bsm_(\d+)\b", listed)
    for arch in filter(None, archs.split(";")):
        number = re.sub(r"\D", "", arch)
        if known and number not in known:
            raise BuildError(
                f"nvcc {toolchain.toolkit} makes no code for sm_{number}, only for {', '.join(f'sm_{name}' for name in known)}: "
                "name one of those (+PTX serves later cards), or install another toolkit."
            )


def _cmake_error(text: str, log: Path) -> str:
    """The sentence of CMake's first error, which it breaks into lines."""
    found = re.search(r"CMake Error[^\n]*:\n\n?((?:  .*\n|\n)+)", text)
    reason = " ".join(found[1].split()) if found else "CMake refused to set up the build."
    return f"{reason} The whole output is in {log}."


def _compile(toolchain: Toolchain, root: Path, folder: Path, options: Options, listener: Listener) -> None:
    """Run ninja. What ptxas tells of the kernels is kept in the folder; all else the compilers say is passed on."""
    command: list[str | Path] = [toolchain.ninja, "-j", str(options.jobs or os.cpu_count() or 1)]
    outputs: dict[str, list[str]] = {}  # by the step that said it
    step = ""
    with (
        (folder / LOG_FILE).open("a", encoding="utf-8") as log,
        _started(command, folder, _environment(toolchain)) as ninja,
    ):
        for line in map(str.rstrip, ninja.stdout or ()):
            log.write(line + "\n")
            found = _STEP.fullmatch(line)
            if found is None:
                outputs.setdefault(step, []).append(line)
                if not resources.is_info(line) and not line.startswith("ninja: "):
                    listener.message(line)
            else:
                step = found[3]
                if found[1] != "0":  # what ninja does to find out what is to be done
                    listener.step(int(found[1]), int(found[2]), step)
    resources.save(folder, root, outputs)
    if ninja.returncode != 0:
        said = [line.strip() for lines in outputs.values() for line in lines]
        reason = next((line for line in said if _ERROR.search(line)), f"ninja ended with code {ninja.returncode}")
        raise BuildError(f"The native library does not compile: {reason} (the whole output is in {folder / LOG_FILE}).")


@contextmanager
def _started(command: list[str | Path], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process whose output is read in the block. It does not outlive the block, also when that is interrupted."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8", errors="replace",
    ) as process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise
