"""Writes manifest/wheels.json from the finished wheels, the matrix and what was seen of the libraries; none is typed by hand.

    python ci/make_manifest.py [--dist FOLDER] [--out FILE] [--check]

`wheels` tells of each wheel what its file says; `cells` answers every six-tuple of the matrix with a wheel or a reason, where
lists stand for all their combinations. Wheels without the label of a cell are left out, with a note. Needs binutils.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from check_library import code_targets
from evidence import CHECKS, Check, highest, read_checks
from matrix import MATRIX_FILE, Cell, Combination, Matrix, MatrixError, cell_of_record, expand, read_matrix, resolve
from wheel_file import Wheel, WheelError, extract_native, read_wheel

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "manifest" / "wheels.json"
SCHEMA = 1
AXES = ("name", "torch", "cuda", "python_abi", "platform", "arch")
MERGE_ORDER = ("arch", "python_abi", "platform", "cuda", "torch", "name")
Entry = dict[str, Any]


def make_manifest(matrix: Matrix, wheels: Sequence[Wheel], checks: Sequence[Check]) -> Entry:
    """The manifest's content. Raises WheelError where a wheel is not what its record says, or two fill one cell."""
    by_cell: dict[str, Wheel] = {}
    for wheel in wheels:
        key = cell_of_record(matrix, wheel.build).key
        if key in by_cell:
            raise WheelError(f"{by_cell[key].path.name} and {wheel.path.name} are both the wheel {key}: remove one of them.")
        by_cell[key] = wheel
    return {
        "schema": SCHEMA,
        "wheels": [_wheel_entry(key, wheel, checks) for key, wheel in sorted(by_cell.items())],
        "cells": _cell_entries(matrix, by_cell, checks),
    }


def is_release(matrix: Matrix, wheel: Wheel) -> str | None:
    """Why the wheel is none of the matrix's, or None if it is one."""
    if wheel.library_sha256 is None:
        return f"it has no library, because {wheel.build['why']}"
    try:
        cell = cell_of_record(matrix, wheel.build)
    except MatrixError as error:
        return str(error)
    return None if wheel.label == cell.label else f"its version is {wheel.version}, without the label {cell.label}"


def _wheel_entry(key: str, wheel: Wheel, checks: Sequence[Check]) -> Entry:
    build, own = wheel.build, [check for check in checks if check.library == wheel.library_sha256]
    with tempfile.TemporaryDirectory() as folder:
        targets = code_targets(extract_native(wheel.path, Path(folder)))
    if targets != {*build["arch"], *build["ptx"]} or wheel.library_sha256 != build["sha256"]:
        raise WheelError(f"{wheel.path.name} does not hold the library that its record tells of: run python ci/verify_wheel.py.")
    return {
        "cell": key,
        "name": build["name"],
        "file": wheel.path.name,
        "version": wheel.version,
        "lane": build["lane"],
        "torch": build["torch"],
        "cuda": build["cuda"],
        "python_abi": build["python_abi"],
        "requires_python": wheel.requires_python,
        "platform": ".".join(wheel.platforms),
        "arch": [target for target in build["arch"] if target in targets],
        "ptx": [target for target in build["ptx"] if target in targets],
        "ops": build["ops"],
        "source": build["source"],
        "size_bytes": wheel.size_bytes,
        "sha256": wheel.sha256,
        "library": {"file": build["library"], "size_bytes": wheel.library_bytes, "sha256": wheel.library_sha256},
        "level": highest(["built", *(check.level for check in own)]),
        "checks": [{field: value for field, value in asdict(check).items() if field != "library"} for check in own],
    }


def _cell_entries(matrix: Matrix, by_cell: dict[str, Wheel], checks: Sequence[Check]) -> list[Entry]:
    built = [matrix.cell(key) for key in by_cell]
    rows = []
    for wanted in expand(matrix):
        found = resolve(matrix, wanted, built)
        if isinstance(found, Cell):
            wheel = by_cell[found.key]
            outcome = {"wheel": wheel.path.name, "level": level_of(wanted, wheel, checks), "why": None}
        else:
            outcome = {"wheel": None, "level": "not-built", "why": found}
        rows.append({**{axis: [value] for axis, value in wanted._asdict().items()}, **outcome})
    for axis in MERGE_ORDER:
        rows = _merged(rows, axis)
    return rows


def level_of(wanted: Combination, wheel: Wheel, checks: Iterable[Check]) -> str:
    """How far the wheel was seen to work in that torch. A run counts for the architecture it ran on; for others it was loaded.

    A torch without CUDA stands for all builds of its version, since it has the fewest symbols.
    """
    levels = ["built"]
    for check in checks:
        cuda = "cu" + wanted.cuda.replace(".", "")
        if check.library == wheel.library_sha256 and check.torch_minor == wanted.torch and check.torch_label in (cuda, "cpu"):
            levels.append("loaded" if check.level == "run" and check.arch != wanted.arch else check.level)
    return highest(levels)


def _merged(rows: list[Entry], axis: str) -> list[Entry]:
    """Rows that differ in nothing but the axis become one."""
    merged: dict[str, Entry] = {}
    for row in rows:
        key = json.dumps({name: value for name, value in row.items() if name != axis})
        if key in merged:
            merged[key][axis] = [*merged[key][axis], *row[axis]]
        else:
            merged[key] = dict(row)
    return list(merged.values())


def render(manifest: Entry) -> str:
    """As it is written: an entry of a wheel over several lines, a cell on one."""
    head = json.dumps({"schema": manifest["schema"], "wheels": manifest["wheels"]}, indent=1)
    cells = ",\n".join("  " + json.dumps(cell) for cell in manifest["cells"])
    return f'{head[:-2]},\n "cells": [\n{cells}\n ]\n}}\n'


def collect(matrix: Matrix, dist: Path) -> tuple[list[Wheel], list[str]]:
    """The wheels of a folder that belong to the matrix, and a note on each of the others."""
    wheels, notes = [], []
    for path in sorted(dist.glob("*.whl"), key=lambda path: path.name):
        wheel = read_wheel(path)
        reason = is_release(matrix, wheel)
        if reason is None:
            wheels.append(wheel)
        else:
            notes.append(f"{path.name} is left out: {reason}")
    return wheels, notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--matrix", type=Path, default=MATRIX_FILE)
    parser.add_argument("--checks", type=Path, default=CHECKS)
    parser.add_argument("--out", type=Path, default=MANIFEST, help="the file to write")
    parser.add_argument("--check", action="store_true", help="write nothing; fail unless the file is what would be written")
    arguments = parser.parse_args()
    matrix = read_matrix(arguments.matrix)
    try:
        wheels, notes = collect(matrix, arguments.dist)
        text = render(make_manifest(matrix, wheels, read_checks(arguments.checks)))
    except WheelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.writelines(f"{note}\n" for note in notes)
    if arguments.check:
        is_same = arguments.out.is_file() and arguments.out.read_text() == text
        sys.stdout.write(f"{arguments.out}: {'as made' if is_same else 'outdated: run python ci/make_manifest.py'}\n")
        return 0 if is_same else 1
    arguments.out.write_text(text)
    sys.stdout.write(f"{arguments.out}: {len(wheels)} wheels\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
