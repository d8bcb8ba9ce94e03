"""Checks a built native library without a GPU: the symbols it wants, the libraries it needs, the machine code it holds.

    python ci/check_library.py python/albatross/_native/librwkv7_state_fwd_fp16.so

Needs binutils (`nm`, `readelf`, `objcopy`) and the `_build.json` beside the library; knows nothing of torch. Called by the tests.
"""

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SYSTEM_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
NEEDED = {"libtorch.so", "ld-linux-x86-64.so.2"} | SYSTEM_LIBRARIES
FOREIGN = re.compile(r"_Z\w*(2at|3c10|5torch)|_?Py[A-Z_]|cuda[A-Z]")  # C++ of one torch, CPython, a shared CUDA runtime
TORCH = re.compile(r"aoti_torch_|torch_")  # the stable ABI: plain C names

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


def problems(library: Path) -> list[str]:
    """One sentence for everything that is wrong with the library."""
    build = json.loads((library.parent / "_build.json").read_text())
    symbols = undefined_symbols(library)
    foreign = sorted(name for name in symbols if FOREIGN.match(name))
    unneeded = sorted(needed_libraries(library) - NEEDED)
    wanted, found = {*build["arch"], *build["ptx"]}, code_targets(library)
    checks = [
        (bool(foreign), f"It wants symbols that tie it to one torch, Python or CUDA: {', '.join(foreign)}."),
        (not any(TORCH.match(name) for name in symbols), "It uses nothing of torch's stable ABI."),
        (bool(unneeded), f"It needs libraries that a machine may lack: {', '.join(unneeded)}."),
        ("libtorch.so" not in needed_libraries(library), "It does not need libtorch.so, so torch's symbols will not be found."),
        (wanted != found, f"It holds code for {', '.join(sorted(found))}, but _build.json says {', '.join(sorted(wanted))}."),
    ]
    return [text for is_wrong, text in checks if is_wrong]


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the built library")
    library = parser.parse_args().file
    found = problems(library)
    for text in found:
        sys.stderr.write(f"{library}: {text}\n")
    if not found:
        sys.stdout.write(f"{library}: good, for {', '.join(sorted(code_targets(library)))}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
