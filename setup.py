"""Builds the native library with CMake where nvcc and torch's headers are found; else a pure package that says why.

Everything else about the package stands in pyproject.toml, everything about compiling in CMakeLists.txt. Never imports
torch: its folder is found by path, also under build isolation. Environment variables:
  ALBATROSS_SKIP_BUILD=1     build the pure package
  ALBATROSS_TORCH_DIR        folder of the torch package whose headers to use
  CUDACXX, CUDA_HOME         the nvcc to use, as elsewhere
  TORCH_CUDA_ARCH_LIST       compute capabilities to build for, as in 8.0;9.0+PTX (default: see CMakeLists.txt)
  ALBATROSS_PTX_ONLY=1       where PTX is built, leave out the machine code of the same architecture: for tests of older code
  ALBATROSS_GLIBC            oldest glibc to run with, as in 2.28: links by the package ziglang; wheels for other machines need it
  MAX_JOBS                   compilers to run at once
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
PACKAGE_DIR = {"albatross": "python/albatross", "albatross_server": "server"}
LIBRARY_NAME = "rwkv7_state_fwd_fp16"
BUILD_SCHEMA = 1  # layout of _build.json, which albatross.ops._loader reads
TORCH_MIN = (2, 10)  # the first with the whole stable ABI


class Toolchain(NamedTuple):
    """What a native build needs."""

    nvcc: Path
    torch: Path


@cache
def find_toolchain() -> Toolchain | str:
    """The tools, or why there can be no native build."""
    if os.environ.get("ALBATROSS_SKIP_BUILD") == "1":
        return "it was built with ALBATROSS_SKIP_BUILD=1"
    if not sys.platform.startswith("linux"):
        return f"it is built on Linux only, not on {sys.platform}"
    nvcc = find_nvcc()
    if nvcc is None:
        return "no nvcc was found when it was built (looked at CUDACXX, CUDA_HOME and PATH)"
    torch = find_torch()
    if torch is None:
        return "no torch {}.{} or later was found when it was built (ALBATROSS_TORCH_DIR names one)".format(*TORCH_MIN)
    return Toolchain(nvcc, torch)


def find_nvcc() -> Path | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = [os.environ["CUDACXX"]] if os.environ.get("CUDACXX") else [f"{home}/bin/nvcc" for home in homes]
    packaged = [f"{folder}/nvidia/cu13/bin/nvcc" for folder in site_folders()]
    found = map(shutil.which, named or ["nvcc", *packaged, "/usr/local/cuda/bin/nvcc"])
    return next((Path(path) for path in found if path), None)


def find_torch() -> Path | None:
    named = os.environ.get("ALBATROSS_TORCH_DIR")
    if named and torch_version(Path(named)) is None:
        sys.exit(f"ALBATROSS_TORCH_DIR must name the folder of a torch package, but {named} is none.")
    folders = [Path(named)] if named else [folder / "torch" for folder in site_folders()]
    return next((folder for folder in folders if release(torch_version(folder) or "0.0") >= TORCH_MIN), None)


def site_folders() -> Iterator[Path]:
    """Where packages may lie, nearest first. Under build isolation only the later ones name the environment aimed at."""
    yield from (Path(path) for path in sys.path if path)
    yield from (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    bins = [Path(path) for path in os.get_exec_path() if shutil.which("python3", path=path)]
    active = [Path(os.environ["VIRTUAL_ENV"])] if os.environ.get("VIRTUAL_ENV") else []
    for prefix in [*active, *(folder.parent for folder in bins)]:
        yield from sorted(prefix.glob("lib*/python3*/site-packages"), reverse=True)


def torch_version(folder: Path) -> str | None:
    try:
        found = re.search(r"__version__ = '(.+)'", (folder / "version.py").read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def compile_library(toolchain: Toolchain, target: Path) -> dict[str, Any]:
    """Run CMake, copy the library into `target`, and return what is to be known of it."""
    folder = ROOT / "build" / "native"
    cmake, ninja = (shutil.which(tool) or sys.exit(f"The native library's build needs {tool}.") for tool in ("cmake", "ninja"))
    settings = {
        "CMAKE_CUDA_COMPILER": toolchain.nvcc,
        "CMAKE_MAKE_PROGRAM": ninja,
        "TORCH_DIR": toolchain.torch,
        "ALBATROSS_ARCHS": os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
        "ALBATROSS_PTX_ONLY": os.environ.get("ALBATROSS_PTX_ONLY", "0"),
        "ALBATROSS_GLIBC": os.environ.get("ALBATROSS_GLIBC", ""),
        "ALBATROSS_ZIG": f"{sys.executable};-m;ziglang",
    }
    options = [f"-D{name}={value}" for name, value in settings.items()]
    # The toolkit's packages keep in lib/ what nvcc looks for in lib64/.
    library_path = [str(toolchain.nvcc.parents[1] / "lib"), *filter(None, [os.environ.get("LIBRARY_PATH")])]
    environment = {**os.environ, "LIBRARY_PATH": ":".join(library_path)}
    # --fresh: the paths of an isolated environment in the cache would be gone at the next build.
    configure = [cmake, "--fresh", "-G", "Ninja", "-S", ROOT, "-B", folder, *options]
    compile_all = [cmake, "--build", folder, "--parallel", os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)]
    for command in (configure, compile_all):
        subprocess.run(command, check=True, env=environment)
    info: dict[str, Any] = json.loads((folder / "build_info.json").read_text())
    library = Path(shutil.copy2(folder / info["library"], target))
    info["torch"]["built_with"] = torch_version(toolchain.torch)
    return {**info, "sha256": hashlib.sha256(library.read_bytes()).hexdigest(), "why": None}


class BuildNative(Command):
    """Puts the library and _build.json into albatross/_native; in an editable install, into the source tree."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        package = ROOT / PACKAGE_DIR["albatross"] if self.editable_mode else Path(self.build_lib or "", "albatross")
        target = package / "_native"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        toolchain = find_toolchain()
        if isinstance(toolchain, str):
            self.warn(f"albatross is built without its native library: {toolchain}.")
            record: dict[str, Any] = {"library": None, "why": toolchain}
        else:
            record = compile_library(toolchain, target)
        head = {"schema": BUILD_SCHEMA, "name": LIBRARY_NAME, "version": self.distribution.get_version()}
        head["platform"] = re.sub(r"[-.]", "_", sysconfig.get_platform())
        (target / "_build.json").write_text(json.dumps({**head, **record}, indent=2) + "\n")

    def get_source_files(self) -> list[str]:
        csrc = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file())
        return ["CMakeLists.txt", *csrc]

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]

    def run(self) -> None:
        if Path(self.build_lib).resolve().is_relative_to(ROOT / "build"):
            shutil.rmtree(self.build_lib, ignore_errors=True)  # files of an earlier build must not end in this wheel
        super().run()


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]  # the library holds no CPython symbol: one wheel for all Pythons


class MaybeNative(Distribution):
    def has_ext_modules(self) -> bool:
        return isinstance(find_toolchain(), Toolchain)


setup(
    distclass=MaybeNative,
    cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": BdistWheel},
    package_dir=PACKAGE_DIR,
    packages=[*find_packages("python"), "albatross_server", *(f"albatross_server.{name}" for name in find_packages("server"))],
)
