"""Builds a finished wheel a second time, from a copy of everything in another folder, and compares the bytes.

The copy runs its own `build_matrix.py`, without a compiler cache; only the toolkit, torch's headers and the tools are shared.
`verify_wheel.py --rebuild` calls it.
"""

import calendar
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from build_cell import source_files
from build_inputs import BUILD, ROOT
from matrix import MatrixError, cell_of_record, read_matrix
from torch_envs import last_line
from wheel_checks import Finding
from wheel_file import Wheel, read_wheel

SUBJECT = "second build elsewhere"
INPUTS = ("pythons", "toolchains", "torch")  # folders under build/ that a second build takes as they are
BUILD_LIMIT_S = 3600


def check_rebuild(wheel: Wheel) -> Finding:
    """Library and wheel must have the same digests again."""
    try:
        key = cell_of_record(read_matrix(), wheel.build).key
    except MatrixError as error:
        return Finding(SUBJECT, False, str(error))
    with tempfile.TemporaryDirectory(prefix="albatross-again-") as folder:
        copy = Path(folder)
        copy_project(copy)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(archive_time(wheel.path)), "CCACHE_DISABLE": "1"}
        command = [sys.executable, "ci/build_matrix.py", "--only", key]
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            return Finding(SUBJECT, False, f"It took longer than {BUILD_LIMIT_S} s.")
        found = sorted((copy / "dist").glob("*.whl"))
        if done.returncode or len(found) != 1:
            log = copy / "build" / "matrix" / f"{key}.log"
            said = log.read_text(errors="replace") if log.is_file() else done.stdout + done.stderr
            return Finding(SUBJECT, False, f"It failed: {last_line(said)}")
        return compare(wheel, read_wheel(found[0]))


def copy_project(folder: Path) -> None:
    """Sources, scripts and matrix; the inputs are links to those of the checkout."""
    scripts = [*(ROOT / "ci").glob("*.py"), *(ROOT / "manifest").glob("*.toml")]
    for name, path in [*source_files(), *((path.relative_to(ROOT).as_posix(), path) for path in scripts)]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (folder / "build").mkdir()
    for name in INPUTS:
        (BUILD / name).mkdir(parents=True, exist_ok=True)
        (folder / "build" / name).symlink_to(BUILD / name)


def archive_time(path: Path) -> int:
    """Seconds since the epoch that the wheel's files bear: what SOURCE_DATE_EPOCH was."""
    with zipfile.ZipFile(path) as archive:
        return max(calendar.timegm((*entry.date_time, 0, 0, 0)) for entry in archive.infolist())


def compare(wheel: Wheel, again: Wheel) -> Finding:
    if wheel.sha256 == again.sha256 and wheel.path.name == again.path.name:
        return Finding(SUBJECT, True, f"library and wheel have the same bytes, sha256 {wheel.sha256[:12]}")
    members = sorted(name for name, _ in set(_members(wheel.path)) ^ set(_members(again.path)))
    unequal = ", ".join(dict.fromkeys(members)) or "the archive's order or times"
    return Finding(SUBJECT, False, f"{again.path.name} has other bytes: {unequal}. Were the sources changed since it was built?")


def _members(path: Path) -> list[tuple[str, int]]:
    with zipfile.ZipFile(path) as archive:
        return [(entry.filename, entry.CRC) for entry in archive.infolist()]
