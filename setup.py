"""Builds the native library where nvcc and torch's headers are found; else a pure package that says why.

Everything else about the package stands in pyproject.toml, everything about compiling in CMakeLists.txt and
python/albatross/build. Never imports torch. Environment variables:
  ALBATROSS_SKIP_BUILD=1     build the pure package
  ALBATROSS_LANE             S: stable ABI (default); C: classic ABI, for one torch and one Python. Named: never a pure package
  ALBATROSS_VERSION_LABEL    local part of the version, as in cu130.stable210
  ALBATROSS_TORCH_DIR        folder of the torch package whose headers to use
  ALBATROSS_GLIBC            oldest glibc to run with, as in 2.28: links by the package ziglang; wheels for other machines need it
  ALBATROSS_PTX_ONLY=1       where PTX is built, leave out the machine code of the same architecture: for tests of older code
  CUDACXX, CUDA_HOME         the nvcc to use, as elsewhere
  TORCH_CUDA_ARCH_LIST       compute capabilities to build for, as in 8.0;9.0+PTX (default: see CMakeLists.txt)
  MAX_JOBS                   compilers to run at once
  SOURCE_DATE_EPOCH          time of all files in the wheel: then the same sources give the same bytes
"""

import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "python"))  # the builder needs no package and no torch, so it works before it is installed

from albatross.build.native import Listener, Options, compile_library, normalize_archs, record_head, write_library  # noqa: E402
from albatross.build.sources import SHIPPED_FOLDER, source_files  # noqa: E402
from albatross.build.toolchain import BuildError, Toolchain, ToolchainError, find_toolchain, release  # noqa: E402

PACKAGE_DIR = {"albatross": "python/albatross", "albatross_server": "server"}
LANE = os.environ.get("ALBATROSS_LANE") or "S"
LABEL = os.environ.get("ALBATROSS_VERSION_LABEL", "").lstrip("+")
GLIBC = os.environ.get("ALBATROSS_GLIBC", "")


@cache
def toolchain_or_reason() -> Toolchain | str:
    """The tools, or why there is no native build."""
    if os.environ.get("ALBATROSS_SKIP_BUILD") == "1":
        return "it was built with ALBATROSS_SKIP_BUILD=1"
    try:
        return find_toolchain(LANE, GLIBC)
    except ToolchainError as error:
        # Who has nvcc and torch, or names a lane, wants the library: then a piece that is missing is no reason to go without.
        if os.environ.get("ALBATROSS_LANE") or not {"Linux", "nvcc", "torch"} & {piece.name for piece in error.missing}:
            sys.exit(f"{error} (ALBATROSS_SKIP_BUILD=1 builds the package without its native library.)")
        return " and ".join(piece.reason for piece in error.missing)
    except BuildError as error:
        sys.exit(str(error))


class Lines(Listener):
    """Writes each step and each word of a compiler on a line of its own."""

    def step(self, done: int, total: int, text: str) -> None:
        self.message(f"[{done}/{total}] {text}")

    def message(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


class BuildNative(Command):
    """Puts the library and its record into albatross/_native; in an editable install, into the source tree.

    A wheel gets the sources too, for `albatross build --jit`.
    """

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        package = ROOT / PACKAGE_DIR["albatross"] if self.editable_mode else Path(self.build_lib or "", "albatross")
        toolchain = toolchain_or_reason()
        if isinstance(toolchain, str):
            self.warn(f"albatross is built without its native library: {toolchain}.")
            write_library(package / "_native", {**record_head(LANE), "library": None, "why": toolchain})
        else:
            self.build_library(toolchain, package / "_native")
        if not self.editable_mode:
            for name, path in source_files(ROOT).items():
                target = package / SHIPPED_FOLDER / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)

    def build_library(self, toolchain: Toolchain, target: Path) -> None:
        jobs = os.environ.get("MAX_JOBS") or "0"
        if not jobs.isdecimal():
            sys.exit(f"MAX_JOBS must be a whole number, found {jobs!r}.")
        try:
            options = Options(
                archs=normalize_archs(os.environ.get("TORCH_CUDA_ARCH_LIST", "")),
                lane=LANE,
                glibc=GLIBC,
                ptx_only=os.environ.get("ALBATROSS_PTX_ONLY") == "1",
                jobs=int(jobs),
            )
            compile_library(toolchain, ROOT, ROOT / "build" / "native", target, options, Lines())
        except BuildError as error:
            sys.exit(str(error))

    def get_source_files(self) -> list[str]:
        return [path.relative_to(ROOT).as_posix() for path in source_files(ROOT).values()]

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
        # The library of lane S holds no symbol of CPython: one wheel for all Pythons. So does a package without one.
        tag = super().get_tag()
        return tag if LANE == "C" and not self.root_is_pure else ("py3", "none", tag[2])

    def write_wheelfile(self, wheelfile_base: str, *arguments: str) -> None:
        """The last that is written before the archive: from here on no umask and no mode of a checkout is left in the files."""
        super().write_wheelfile(wheelfile_base, *arguments)
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)


class MaybeNative(Distribution):
    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        """The library of lane C opens in one torch alone, so pip must not take another."""
        super().parse_config_files(*arguments, **options)
        toolchain = toolchain_or_reason()
        if LANE == "C" and isinstance(toolchain, Toolchain):
            pin = "torch=={}.{}.*".format(*release(toolchain.torch_version))
            self.install_requires = [pin if re.match(r"torch\b", line) else line for line in self.install_requires]
            self.metadata.install_requires = self.install_requires

    def has_ext_modules(self) -> bool:
        return isinstance(toolchain_or_reason(), Toolchain)


if not re.fullmatch(r"(?:[a-z0-9]+(?:\.[a-z0-9]+)*)?", LABEL):
    sys.exit(f"ALBATROSS_VERSION_LABEL must be small letters and digits, as in cu130.stable210, but is {LABEL!r}.")
setup(
    distclass=MaybeNative,
    cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": BdistWheel},
    package_dir=PACKAGE_DIR,
    packages=[*find_packages("python"), "albatross_server", *(f"albatross_server.{name}" for name in find_packages("server"))],
    options={"egg_info": {"tag_build": f"+{LABEL}"}} if LABEL else {},
)
