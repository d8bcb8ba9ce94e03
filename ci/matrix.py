"""Reads manifest/matrix.toml: the wheels that are wanted, and for each of them, and each six-tuple, a wheel or why there is none.

Pure beyond reading that one file: knows no compiler, no registry and no finished wheel. `build_matrix.py` builds by it, and the
manifest's generator asks it for the reason of every six-tuple that no wheel serves.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MATRIX_FILE = Path(__file__).resolve().parents[1] / "manifest" / "matrix.toml"
MATRIX_SCHEMA = 2


class MatrixError(Exception):
    """The matrix contradicts itself, or has no such cell; the text says what was expected and what was found."""


class Combination(NamedTuple):
    """The six-tuple: one thing a user may have."""

    name: str
    torch: str  # minor version, as in "2.11"
    cuda: str  # that torch was built with, as in "13.0"
    python_abi: str  # as in "cp312"; "none" asks for a wheel that serves any Python
    platform: str  # as in "linux_x86_64"
    arch: str  # of the card, as in "sm_90"


@dataclass(frozen=True, slots=True)
class Cell:
    """One wheel that is wanted."""

    name: str  # of the library
    lane: str  # "S" or "C"
    torch: str  # lane S: the first minor version it serves; lane C: the only one
    cuda: str  # of the toolkit
    python_abi: str  # "none" in lane S
    platform: str
    arch: tuple[str, ...]  # machine code for these
    ptx: tuple[str, ...]  # and code that the driver compiles for later cards

    @property
    def key(self) -> str:
        """Its name on the command line, in tables and of its folder."""
        cuda = f"cu{self.cuda.replace('.', '')}"
        exact = f"C-torch{self.torch}-{cuda}-{self.python_abi}-{self.platform}"
        return exact if self.lane == "C" else f"S-{cuda}-{self.platform}"

    @property
    def label(self) -> str:
        """What stands after the plus sign of the wheel's version."""
        kind = "torch" if self.lane == "C" else "stable"
        return f"cu{self.cuda.replace('.', '')}.{kind}{self.torch.replace('.', '')}"

    def serves(self, wanted: Combination) -> bool:
        """Whether a machine with that six-tuple can use the wheel, given a driver that its toolkit's major version runs with."""
        if (self.name, self.platform) != (wanted.name, wanted.platform) or not self.runs_on(wanted.arch):
            return False
        if self.lane == "C":
            return (self.torch, self.cuda, self.python_abi) == (wanted.torch, wanted.cuda, wanted.python_abi)
        return _numbers(wanted.torch) >= _numbers(self.torch)

    def runs_on(self, arch: str) -> bool:
        """Machine code runs on its own major version from its minor on, PTX from its capability on."""
        card = _capability(arch)
        codes = map(_capability, self.arch)
        return any(code[0] == card[0] and code <= card for code in codes) or any(_capability(ptx) <= card for ptx in self.ptx)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The file's content. The three tables hold facts, keyed by what they are about."""

    name: str
    glibc: str
    stable_headers: str  # torch whose headers lane S takes
    default: tuple[str, ...]  # keys of the cells that are built without being named
    tools: tuple[str, ...]
    cells: dict[str, Cell]  # by key
    torch: dict[str, dict[str, Any]]
    cuda: dict[str, dict[str, Any]]
    platform: dict[str, dict[str, Any]]

    def headers_of(self, cell: Cell) -> str:
        """The torch whose headers the cell is compiled with."""
        return self.stable_headers if cell.lane == "S" else cell.torch

    def cell(self, key: str) -> Cell:
        try:
            return self.cells[key]
        except KeyError:
            raise MatrixError(f"The matrix has no cell {key}: python ci/build_matrix.py --list names them all.") from None

    def cell_of(self, wanted: Combination) -> Cell:
        """The cell that is about this six-tuple: of lane S if any Python is to be served."""
        if wanted.python_abi != "none":
            return self.cell(Cell(wanted.name, "C", *wanted[1:5], (), ()).key)
        major = _numbers(wanted.cuda)[0]
        cells = (cell for cell in self.cells.values() if cell.lane == "S" and cell.platform == wanted.platform)
        found = next((cell for cell in cells if _numbers(cell.cuda)[0] == major), None)
        if found is None:
            raise MatrixError(f"The matrix has no cell of lane S for CUDA {major} on {wanted.platform}.")
        return found


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine builds with."""

    platform: str
    toolkits: frozenset[str]  # CUDA versions, minor included
    pythons: frozenset[str]  # interpreters that have their headers


class Plan(NamedTuple):
    """What is to become of a cell."""

    action: str  # "build": without being named; "named": only if named; "refused": not at all
    reason: str | None  # a sentence, unless it is built


def read_matrix(path: Path = MATRIX_FILE) -> Matrix:
    """Raises MatrixError where a cell stands twice, or names a torch, CUDA or platform of which the file knows nothing."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    if content["schema"] != MATRIX_SCHEMA:
        raise MatrixError(f"{path} has layout {content['schema']}, expected {MATRIX_SCHEMA}.")
    cells = tuple(cell for entry in content["cell"] for cell in _cells(content, entry))
    keys = [cell.key for cell in cells]
    wrong = sorted({key for key in keys if keys.count(key) > 1}) + sorted(set(content["default"]) - set(keys))
    if wrong:
        raise MatrixError(f"{path} must have each of these cells once: {', '.join(wrong)}.")
    return Matrix(
        name=content["name"],
        glibc=content["glibc"],
        stable_headers=content["stable_headers"],
        default=tuple(content["default"]),
        tools=tuple(content["tools"]),
        cells={cell.key: cell for cell in cells},
        torch=content["torch"],
        cuda=content["cuda"],
        platform=content["platform"],
    )


def _cells(content: dict[str, Any], entry: dict[str, Any]) -> Iterator[Cell]:
    for torch, cuda, python_abi, platform in product(entry["torch"], entry["cuda"], entry["python_abi"], entry["platform"]):
        for table, key in (("torch", torch), ("cuda", cuda), ("platform", platform)):
            if key not in content[table]:
                raise MatrixError(f"A cell names {table} {key}, but the matrix has no [{table}.{key!r}].")
        toolkit = content["cuda"][cuda]
        arch, ptx = tuple(toolkit["arch"]), tuple(toolkit["ptx"])
        yield Cell(content["name"], entry["lane"], torch, cuda, python_abi, platform, arch, ptx)


def registry_machine(matrix: Matrix, platform: str = "linux_x86_64") -> Machine:
    """A machine that has what the package registry gives and every Python: the same reasons wherever they are asked for."""
    toolkits = frozenset(version for version, facts in matrix.cuda.items() if "packages" in facts)
    return Machine(platform, toolkits, frozenset(cell.python_abi for cell in matrix.cells.values()))


def plan(matrix: Matrix, cell: Cell, machine: Machine) -> Plan:
    """What becomes of the cell on that machine. The first reason is the one nearest to the user: no such torch comes first."""
    reason = _missing_torch(matrix, cell.torch, cell.cuda, cell.python_abi) if cell.lane == "C" else None
    reason = reason or _missing_tool(matrix, cell, machine)
    if reason is not None:
        return Plan("refused", reason)
    if cell.key in matrix.default:
        return Plan("build", None)
    mend = f"It is built only if named: python ci/build_matrix.py --only {cell.key}."
    other = next((key for key in matrix.default if key.startswith("S-") and key.endswith(cell.platform)), None)
    is_served = cell.lane == "C" and other is not None and _numbers(cell.torch) >= _numbers(matrix.cell(other).torch)
    return Plan("named", f"The wheel {other} serves it. {mend}" if is_served else mend)


def _missing_torch(matrix: Matrix, torch: str, cuda: str, python_abi: str) -> str | None:
    facts = matrix.torch[torch]
    if cuda not in facts["cuda"]:
        return f"No torch {torch} for CUDA {cuda} is known."
    if python_abi not in {"none", *facts["python"]}:
        return f"There is no torch {torch} for Python {_python(python_abi)}."
    return None


def _missing_tool(matrix: Matrix, cell: Cell, machine: Machine) -> str | None:
    if cell.platform != machine.platform:
        why = matrix.platform[cell.platform].get("why", "a wheel is built on its own platform")
        return f"This is {machine.platform}, and no wheel for {cell.platform} comes from it: {why}."
    if cell.cuda not in machine.toolkits:
        why = matrix.cuda[cell.cuda].get("why", "the matrix names no packages that hold one")
        return f"There is no nvcc {cell.cuda} on PATH, and {why}."
    if cell.python_abi not in {"none", *machine.pythons}:
        version = _python(cell.python_abi)
        return f"No Python {version} with its headers was found: install one (python{version}-dev, or pyenv install {version})."
    return None


def expand(matrix: Matrix) -> tuple[Combination, ...]:
    """Every six-tuple that the cells are about, each once: any Python is `none` in lane S, which serves all later torches."""
    return tuple(dict.fromkeys(wanted for cell in matrix.cells.values() for wanted in _combinations(matrix, cell)))


def _combinations(matrix: Matrix, cell: Cell) -> Iterator[Combination]:
    torches, cudas = [cell.torch], [cell.cuda]
    if cell.lane == "S":
        torches = [torch for torch in matrix.torch if _numbers(torch) >= _numbers(cell.torch)]
        cudas = [cuda for cuda in matrix.cuda if _numbers(cuda)[0] == _numbers(cell.cuda)[0]]
    archs = dict.fromkeys(arch for facts in matrix.cuda.values() for arch in facts["arch"])
    for torch, cuda, arch in product(torches, cudas, archs):
        yield Combination(matrix.name, torch, cuda, cell.python_abi, cell.platform, arch)


def resolve(matrix: Matrix, wanted: Combination, built: Iterable[Cell], machine: Machine | None = None) -> Cell | str:
    """The wheel that serves the six-tuple, the exact one before the others; or one sentence why there is none.

    `built` are the cells of the finished wheels. Without `machine` the reasons are those of `registry_machine`.
    """
    reason = _missing_torch(matrix, wanted.torch, wanted.cuda, wanted.python_abi)
    if reason is not None:
        return reason
    serving = sorted((cell for cell in built if cell.serves(wanted)), key=lambda cell: (cell.lane, cell.cuda != wanted.cuda))
    if serving:
        return serving[0]
    own = matrix.cell_of(wanted)
    if not own.runs_on(wanted.arch):
        return f"nvcc {own.cuda} compiles nothing that runs on {wanted.arch}: a later CUDA does."
    fate = plan(matrix, own, machine or registry_machine(matrix))
    return fate.reason or f"The wheel {own.key} can be built, but is not among the finished ones: run python ci/build_matrix.py."


def cell_of_record(matrix: Matrix, record: dict[str, Any]) -> Cell:
    """The cell that a finished wheel fills, by its build record. Raises MatrixError if the matrix wants no such wheel."""
    torch, cuda = record["torch"]["min"], ".".join(record["cuda"]["toolkit"].split(".")[:2])
    name, lane, python_abi, platform = (record[key] for key in ("name", "lane", "python_abi", "platform"))
    wanted = Cell(name, lane, torch, cuda, python_abi, platform, (), ())
    found = matrix.cell(wanted.key)
    if (found.name, found.torch) != (name, torch):
        raise MatrixError(f"The cell {found.key} is for {found.name} and torch {found.torch}, found {name} and torch {torch}.")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _capability(name: str) -> tuple[int, int]:
    """(12, 0) of "sm_120" and "compute_120"."""
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)", name)
    if found is None:
        raise MatrixError(f"An architecture must look like sm_90 or compute_90, found {name}.")
    return int(found[1]), int(found[2])


def _python(abi: str) -> str:
    return f"{abi[2]}.{abi[3:]}"
