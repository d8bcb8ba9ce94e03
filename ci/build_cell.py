"""Builds one wheel of the matrix: a working copy of the sources, setup.py in it, auditwheel, and a note of what it was made of.

A cell whose note still holds is not built again. Knows nothing of the other cells and of the screen. `build_matrix.py` calls it.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic

from build_inputs import BUILD, ROOT, Inputs
from matrix import Cell, Matrix

DIST = ROOT / "dist"
NOTES = BUILD / "matrix"
SOURCE_FOLDERS = ("python", "server", "csrc")
SOURCE_FILES = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "setup.py")
UNSOURCED = re.compile(r".*(/__pycache__|/_native|/_source|\.egg-info)(/.*)?|.*\.(pyc|so)")  # made by builds and installs
REPAIR_SCRIPT = ROOT / "ci" / "repair_wheel.py"
BUILD_CODE = "from setuptools import build_meta; build_meta.build_wheel('dist')"
# What would change a build from outside of it.
DROPPED_VARIABLES = re.compile(
    r"ALBATROSS_.*|PIP_.*|PYTHON.*|CUDA.*|TORCH_.*|VIRTUAL_ENV|C(XX|PP)?FLAGS|LDFLAGS|CC|CXX|LIBRARY_PATH|NVCC_.*"
)
STEP = re.compile(r"\[(\d+)/(\d+)\] ")
Step = Callable[[str, float], None]  # what is being done, and which part of it is done


class CellProblem(Exception):
    """The cell could not be built; the text says at which step."""


@dataclass(frozen=True)
class Built:
    """A finished wheel in dist/. `seconds` is what it took when it was built, also if it was kept."""

    wheel: Path
    size_bytes: int
    seconds: float
    is_kept: bool


class Builder:
    """Builds cells one at a time in its own working copies, one a toolkit: what the last cell compiled serves the next one."""

    def __init__(self, matrix: Matrix, inputs: Inputs, slot: int, num_compilers: int) -> None:
        self._matrix = matrix
        self._inputs = inputs
        self._slot = slot
        self._num_compilers = num_compilers

    def build(self, cell: Cell, step: Step) -> Built:
        """The cell's wheel, built unless that was done. Raises CellProblem, and InputProblem where something can't be had."""
        digest = inputs_digest(self._matrix, cell, self._inputs.compilers(cell.cuda))
        kept = _kept(cell, digest)
        if kept is not None:
            return kept
        _forget(cell)
        start = monotonic()
        log = log_path(cell)
        log.write_bytes(b"")
        step("toolkit", 0.0)
        nvcc = self._inputs.nvcc(cell.cuda)
        step("torch", 0.0)
        torch = self._inputs.torch(self._matrix.headers_of(cell))
        step("tools", 0.0)
        python = self._inputs.python(cell.python_abi)
        copy = NOTES / f"cu{cell.cuda.replace('.', '')}-{self._slot}"
        mirror_sources(copy)
        for folder in ("dist", "repaired"):
            shutil.rmtree(copy / folder, ignore_errors=True)
        environment = self._environment(cell, nvcc, torch, python)
        _run([str(python), "-c", BUILD_CODE], copy, environment, log, step)
        (raw,) = (copy / "dist").glob("*.whl")
        step("auditwheel", 1.0)
        tag = self._matrix.platform[cell.platform]["tag"]
        _run([str(python), str(REPAIR_SCRIPT), str(raw), "--dest", "repaired", "--plat", tag], copy, environment, log, step)
        (wheel,) = (copy / "repaired").glob("*.whl")
        DIST.mkdir(exist_ok=True)
        return _note(cell, digest, Path(shutil.copyfile(wheel, DIST / wheel.name)), monotonic() - start)

    def _environment(self, cell: Cell, nvcc: Path, torch: Path, python: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not DROPPED_VARIABLES.fullmatch(name)}
        return {
            **kept,
            "PATH": f"{python.parent}:{kept.get('PATH', os.defpath)}",
            "ALBATROSS_LANE": cell.lane,
            "ALBATROSS_VERSION_LABEL": cell.label,
            "ALBATROSS_GLIBC": self._matrix.glibc,
            "ALBATROSS_TORCH_DIR": str(torch),
            "CUDACXX": str(nvcc),
            "TORCH_CUDA_ARCH_LIST": arch_list(cell),
            "MAX_JOBS": str(self._num_compilers),
            "SOURCE_DATE_EPOCH": source_time(),
        }


def log_path(cell: Cell) -> Path:
    NOTES.mkdir(parents=True, exist_ok=True)
    return NOTES / f"{cell.key}.log"


def arch_list(cell: Cell) -> str:
    """The cell's architectures in the form of TORCH_CUDA_ARCH_LIST, as in "8.0;9.0+PTX"."""
    names = [f"{arch[3:-1]}.{arch[-1]}{'+PTX' if f'compute_{arch[3:]}' in cell.ptx else ''}" for arch in cell.arch]
    return ";".join(names)


def source_time() -> str:
    """Seconds since the epoch of the last commit that touched the sources: the time of every file in a wheel."""
    named = os.environ.get("SOURCE_DATE_EPOCH")
    if named:
        return named
    command = ["git", "log", "-1", "--format=%ct", "--", *SOURCE_FOLDERS, *SOURCE_FILES]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "315532800"
    return done.stdout.strip() or "315532800"  # no history: 1980, where the time of archives begins


def inputs_digest(matrix: Matrix, cell: Cell, compilers: str) -> str:
    """Of all that decides the wheel's bytes: sources, cell, compilers, torch, tools, time, and these very steps."""
    digest = sha256()
    release = matrix.torch[matrix.headers_of(cell)]["release"]
    facts = [asdict(cell), matrix.cuda[cell.cuda], matrix.platform[cell.platform], matrix.glibc, matrix.tools]
    digest.update(json.dumps([*facts, release, compilers, source_time()], sort_keys=True).encode())
    for script in (Path(__file__), REPAIR_SCRIPT):
        digest.update(script.read_bytes())
    for name, path in sorted(source_files()):
        digest.update(f"\0{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def source_files() -> Iterator[tuple[str, Path]]:
    """What a wheel is made from, by its path from the root."""
    paths = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in [*paths, *(ROOT / name for name in SOURCE_FILES)]:
        name = path.relative_to(ROOT).as_posix()
        if not UNSOURCED.fullmatch(name):
            yield name, path


def mirror_sources(copy: Path) -> None:
    """Makes the sources in `copy` those of the checkout. A file that is the same keeps its time, so that it compiles once."""
    wanted = dict(source_files())
    for folder in SOURCE_FOLDERS:
        for path in [path for path in (copy / folder).rglob("*") if not path.is_dir()]:
            if path.relative_to(copy).as_posix() not in wanted:
                path.unlink()
    for name, path in wanted.items():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file() or target.read_bytes() != path.read_bytes():
            shutil.copyfile(path, target)
        target.chmod(0o644)


def _run(command: list[str], folder: Path, environment: dict[str, str], log: Path, step: Step) -> None:
    """Run with the output in the log, telling `step` how far ninja is. Raises CellProblem."""
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, encoding="utf-8", errors="replace",
        ) as process,
    ):
        file.write(f"$ {' '.join(command)}\n")
        for line in process.stdout or ():
            file.write(line)
            found = STEP.match(line)
            if found:
                step("compile", int(found[1]) / int(found[2]))
    if process.returncode != 0:
        what = "auditwheel" if str(REPAIR_SCRIPT) in command else "setup.py"
        raise CellProblem(f"{what} ended with code {process.returncode}")


def _note_path(cell: Cell) -> Path:
    return NOTES / f"{cell.key}.json"


def _note(cell: Cell, digest: str, wheel: Path, seconds: float) -> Built:
    content = wheel.read_bytes()
    note = {"digest": digest, "wheel": wheel.name, "sha256": sha256(content).hexdigest(), "seconds": round(seconds, 1)}
    _note_path(cell).write_text(json.dumps(note, indent=2) + "\n")
    return Built(wheel, len(content), seconds, is_kept=False)


def _kept(cell: Cell, digest: str) -> Built | None:
    """The cell's wheel, if it was built from these inputs and is still the file that was built."""
    try:
        note = json.loads(_note_path(cell).read_text())
        content = (DIST / note["wheel"]).read_bytes()
    except (OSError, ValueError):
        return None
    if note["digest"] != digest or note["sha256"] != sha256(content).hexdigest():
        return None
    return Built(DIST / note["wheel"], len(content), note["seconds"], is_kept=True)


def _forget(cell: Cell) -> None:
    """Remove the wheel of an earlier build and its note: what fails now must not look as if it were there."""
    try:
        wheel = DIST / json.loads(_note_path(cell).read_text())["wheel"]
    except (OSError, ValueError):
        wheel = None
    if wheel is not None:
        wheel.unlink(missing_ok=True)
    _note_path(cell).unlink(missing_ok=True)
