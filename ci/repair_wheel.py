"""Gives a finished Linux wheel its manylinux tag by auditwheel, which checks that it needs no more than that tag allows.

    python ci/repair_wheel.py WHEEL --dest FOLDER [--plat manylinux_2_28_x86_64]

What a machine has by its torch and its driver is neither copied into the wheel nor refused. `build_cell.py` and cibuildwheel
call it.
"""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

EXCLUDED = ("libtorch*.so", "libc10*.so", "libcudart.so.*", "libcuda.so.*")
PLAT = "manylinux_2_28_x86_64"


def repair_command(wheel: Path, dest: Path, plat: str) -> list[str]:
    excludes = [word for pattern in EXCLUDED for word in ("--exclude", pattern)]
    auditwheel = [sys.executable, "-m", "auditwheel"] if find_spec("auditwheel") else ["auditwheel"]
    return [*auditwheel, "repair", "--plat", plat, "--only-plat", *excludes, "--wheel-dir", str(dest), str(wheel)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--dest", type=Path, required=True, help="folder for the wheel with its new name")
    parser.add_argument("--plat", default=PLAT)
    options = parser.parse_args()
    return subprocess.run(repair_command(options.wheel, options.dest, options.plat), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
