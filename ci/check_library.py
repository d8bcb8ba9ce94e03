"""Checks a built native library without a GPU: the symbols it wants, the libraries it needs, the machine code it holds.

    python ci/check_library.py [--torch FOLDER] python/albatross/_native/librwkv7_state_fwd_fp16.so

Needs binutils (`nm`, `readelf`, `objcopy`) and the `_build.json` beside the library, whose lane says what is allowed; runs no
torch. With --torch, all that the library wants of torch must be found in that torch's libraries. Called by the tests and by
verify_wheel.py.
"""

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

SYSTEM_LIBRARIES = {
    "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}
# What a library of a lane may need of torch. libtorch.so pulls in the others, as far as that torch has them.
TORCH_LIBRARIES = {
    "S": {"libtorch.so"},
    "C": {"libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so", "libc10.so", "libc10_cuda.so"},
}
TORCH_C = re.compile(r"aoti_torch_|torch_")  # the stable ABI: plain C names
TORCH_CPP = re.compile(r"_Z\w*(2at|3c10|5torch)")  # C++ of one torch
PYTHON = re.compile(r"_?Py[A-Z_]")
CUDA = re.compile(r"cuda[A-Z]")  # a shared CUDA runtime

HEADER_PATH = re.compile(rb"(?<![\w./+-])/[\w./+-]+\.(?:hpp|cuh|cpp|cu|h)\b")  # of a folder; gcc and nvcc write it for __FILE__

# An image in the .nv_fatbin section: a header, then entries of machine code or PTX, each for one capability. The layout is
# not documented; these fields were found by comparison with `cuobjdump --list-elf --list-ptx`.
FATBIN_MAGIC = 0xBA55ED50
FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
ENTRY_HEADER = struct.Struct("<HHIQ12xI")  # kind, version, bytes of this header, bytes of the body, ..., capability
KINDS = {1: "compute", 2: "sm"}


def undefined_symbols(library: Path) -> set[str]:
    lines = run("nm", "-D", "--undefined-only", str(library)).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def needed_libraries(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", str(library))))


def code_targets(library: Path) -> set[str]:
    """The architectures the library holds code for: sm_* is machine code, compute_* is PTX."""
    with tempfile.TemporaryDirectory() as folder:
        section = Path(folder) / "fatbin"
        run("objcopy", "-O", "binary", "--only-section=.nv_fatbin", str(library), str(section))
        return set(_targets(section.read_bytes()))


def _targets(section: bytes) -> Iterator[str]:
    magic = struct.pack("<I", FATBIN_MAGIC)
    image = section.find(magic)
    while image >= 0:
        _, _, header_bytes, body_bytes = FATBIN_HEADER.unpack_from(section, image)
        entry, end = image + header_bytes, image + header_bytes + body_bytes
        while entry < end:
            kind, _, entry_bytes, code_bytes, capability = ENTRY_HEADER.unpack_from(section, entry)
            yield f"{KINDS[kind]}_{capability}"
            entry += entry_bytes + code_bytes
        image = section.find(magic, end)


def find_cuobjdump() -> str | None:
    """NVIDIA's own tool, of a CUDA toolkit or of the package nvidia-cuda-cuobjdump, whose file may lack the right to run."""
    folders = [Path(folder) / "nvidia" for folder in {*sys.path, sysconfig.get_path("purelib")} if folder]
    packaged = [tool for folder in folders for tool in sorted(folder.glob("*/bin/cuobjdump"), reverse=True)]
    for tool in packaged:
        if not os.access(tool, os.X_OK):
            tool.chmod(0o755)
    return shutil.which("cuobjdump") or next(map(str, packaged), None)


def cuobjdump_targets(tool: str, library: Path) -> set[str]:
    """The same as `code_targets`, as NVIDIA's tool sees it."""
    machine_code = re.findall(r"\.(sm_\w+)\.cubin", run(tool, "--list-elf", str(library)))
    ptx = re.findall(r"\.sm_(\w+)\.ptx", run(tool, "--list-ptx", str(library)))
    return {*machine_code, *(f"compute_{number}" for number in ptx)}


def is_of_torch(symbol: str) -> bool:
    return bool(TORCH_C.match(symbol) or TORCH_CPP.match(symbol))


@cache
def torch_symbols(torch: Path) -> frozenset[str]:
    """All that the libraries in the folder of a torch package define."""
    libraries = sorted((torch / "lib").glob("lib*.so"))
    lines = (line for library in libraries for line in run("nm", "-D", "--defined-only", str(library)).splitlines())
    return frozenset(line.split()[-1].partition("@")[0] for line in lines)


def missing_symbols(library: Path, defined: frozenset[str]) -> list[str]:
    """What the library cannot do without and does not find in a torch that defines these symbols."""
    lines = run("nm", "-D", "--undefined-only", str(library)).splitlines()
    strong = {line.split()[-1].partition("@")[0] for line in lines if line.split()[-2] == "U"}
    return sorted(symbol for symbol in strong - defined if is_of_torch(symbol))


def problems(library: Path, torch: Path | None = None) -> list[str]:
    """One sentence for everything that is wrong with the library; `torch` is the folder of a torch it must fit."""
    build = json.loads((library.parent / "_build.json").read_text())
    found = [*symbol_problems(library, build), *code_problems(library, build), *path_problems(library)]
    return found + (torch_problems(library, torch) if torch else [])


def symbol_problems(library: Path, build: dict[str, Any]) -> list[str]:
    is_stable = build.get("lane", "S") == "S"
    symbols, needed = undefined_symbols(library), needed_libraries(library)
    forbidden = [CUDA] + ([PYTHON] if build["python_abi"] == "none" else []) + ([TORCH_CPP] if is_stable else [])
    foreign = sorted(name for name in symbols if any(pattern.match(name) for pattern in forbidden))
    unneeded = sorted(needed - SYSTEM_LIBRARIES - TORCH_LIBRARIES[build.get("lane", "S")])
    wanted, name = (TORCH_C, "stable ABI") if is_stable else (TORCH_CPP, "C++ ABI")
    checks = [
        (bool(foreign), f"It wants symbols that tie it to one torch, Python or CUDA: {', '.join(foreign)}."),
        (not any(wanted.match(symbol) for symbol in symbols), f"It uses nothing of torch's {name}."),
        (bool(unneeded), f"It needs libraries that a machine may lack: {', '.join(unneeded)}."),
        ("libtorch.so" not in needed, "It does not need libtorch.so, so torch's symbols will not be found."),
    ]
    return [text for is_wrong, text in checks if is_wrong]


def code_problems(library: Path, build: dict[str, Any]) -> list[str]:
    wanted, found, tool = {*build["arch"], *build["ptx"]}, code_targets(library), find_cuobjdump()
    told = found if tool is None else cuobjdump_targets(tool, library)
    checks = [
        (wanted != found, f"It holds code for {_listed(found)}, but _build.json says {_listed(wanted)}."),
        (told != found, f"It holds code for {_listed(found)}, but cuobjdump says {_listed(told)}."),
    ]
    return [text for is_wrong, text in checks if is_wrong]


def path_problems(library: Path) -> list[str]:
    """A folder of the machine that built it would make another machine's library differ."""
    found = HEADER_PATH.findall(library.read_bytes())
    return [f"It names files of the machine that built it, such as {found[0].decode()}; expected none."] if found else []


def torch_problems(library: Path, torch: Path) -> list[str]:
    missing = missing_symbols(library, torch_symbols(torch))
    return [f"It wants symbols that {torch} does not have: {', '.join(missing)}."] if missing else []


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the built library")
    parser.add_argument("--torch", type=Path, metavar="FOLDER", help="folder of a torch package that must have all it wants")
    arguments = parser.parse_args()
    library = arguments.file
    found = problems(library, arguments.torch)
    for text in found:
        sys.stderr.write(f"{library}: {text}\n")
    if not found:
        sys.stdout.write(f"{library}: good, for {', '.join(sorted(code_targets(library)))}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
