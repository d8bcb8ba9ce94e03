"""Small wheels and libraries for the tests of ci/: real archives and real ELF files, made by binutils without a compiler."""

import base64
import csv
import hashlib
import io
import json
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from check_library import ENTRY_HEADER, FATBIN_HEADER, FATBIN_MAGIC
from matrix import Cell, read_matrix
from wheel_file import Wheel, read_wheel

MATRIX = read_matrix()
STABLE = MATRIX.cells["S-cu130-linux_x86_64"]
CLASSIC = MATRIX.cells["C-torch2.11-cu130-cp312-linux_x86_64"]
RELEASES = {"S": "2.13.0+cpu", "C": "2.11.0+cu130"}  # torches that the stand-ins claim to be built with

BINUTILS = ("as", "ld", "objcopy", "nm", "readelf")
needs_binutils = pytest.mark.skipif(not all(map(shutil.which, BINUTILS)), reason=f"needs {', '.join(BINUTILS)}")


def record(cell: Cell = STABLE, **changes: Any) -> dict[str, Any]:
    """The build record of a wheel that fills the cell."""
    abi, torch_max = ("stable", None) if cell.lane == "S" else ("classic", cell.torch)
    return {
        "schema": 2, "name": cell.name, "version": "0.1.0", "lane": cell.lane, "library": f"lib{cell.name}.so",
        "platform": cell.platform,
        "torch": {"abi": abi, "min": cell.torch, "max": torch_max, "built_with": RELEASES[cell.lane]},
        "cuda": {"toolkit": f"{cell.cuda}.88", "cudart": "static", "driver_min": "580"},
        "python_abi": cell.python_abi, "arch": list(cell.arch), "ptx": list(cell.ptx), "ops": ["wkv7_prefill"],
        "source": "5" * 64, "sha256": "", "why": None, **changes,
    }  # fmt: skip


def make_library(
    folder: Path,
    symbols: Sequence[str] = ("aoti_torch_abi_version",),
    targets: Sequence[str] = (*STABLE.arch, *STABLE.ptx),
    needed: Sequence[str] = ("libtorch.so",),
    weak: Sequence[str] = (),
) -> Path:
    """A shared library that wants these symbols, needs these libraries and holds (empty) code for these targets."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in needed:
        define_library(folder / "needed" / name, ())
    (folder / "code").write_bytes(fatbin(targets))
    wanted = [f".quad {symbol}" for symbol in (*symbols, *weak)] + [f".weak {symbol}" for symbol in weak]
    lines = ['.section .nv_fatbin,"a"', f'.incbin "{folder / "code"}"', ".data", *wanted]
    (folder / "library.s").write_text("\n".join(lines) + "\n")
    library = folder / f"lib{STABLE.name}.so"
    _run("as", "-o", str(folder / "library.o"), str(folder / "library.s"))
    links = [str(folder / "needed" / name) for name in needed]
    _run("ld", "-shared", "--no-as-needed", "-o", str(library), str(folder / "library.o"), *links)
    return library


def define_library(path: Path, symbols: Sequence[str]) -> Path:
    """A shared library that defines these symbols."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [".data", *(f".globl {symbol}\n{symbol}: .quad 0" for symbol in symbols)]
    path.with_suffix(".s").write_text("\n".join(lines) + "\n")
    _run("as", "-o", str(path.with_suffix(".o")), str(path.with_suffix(".s")))
    _run("ld", "-shared", "-soname", path.name, "-o", str(path), str(path.with_suffix(".o")))
    return path


def fatbin(targets: Sequence[str]) -> bytes:
    """An image with an entry of eight zero bytes for each target."""
    body = b""
    for target in targets:
        kind, _, capability = target.partition("_")
        header = ENTRY_HEADER.pack(2 if kind == "sm" else 1, 0x101, ENTRY_HEADER.size, 8, int(capability))
        body += header + bytes(8)
    return FATBIN_HEADER.pack(FATBIN_MAGIC, 1, struct.calcsize("<IHHQ"), len(body)) + body


def make_wheel(
    folder: Path,
    cell: Cell = STABLE,
    code: bytes = b"stand-in",
    *,
    label: str | None = None,
    files: dict[str, bytes] | None = None,
    requires: str | None = None,
    **changes: Any,
) -> Wheel:
    """A wheel that fills the cell; `code` is its library, `changes` those to its record, `files` more than every wheel has."""
    build = record(cell, **{"sha256": hashlib.sha256(code).hexdigest(), **changes})
    version = f"{build['version']}+{cell.label if label is None else label}".rstrip("+")
    tag = "py3-none" if cell.python_abi == "none" else f"{cell.python_abi}-{cell.python_abi}"
    tag = f"{tag}-{MATRIX.platform[cell.platform]['tag']}"
    info = f"albatross_rwkv-{version}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: albatross-rwkv\nVersion: {version}\nRequires-Python: >=3.10\n"
    metadata += f"Requires-Dist: {requires or ('torch>=2.10,<3' if cell.lane == 'S' else f'torch=={cell.torch}.*')}\n"
    content = {
        "albatross/__init__.py": b'__version__ = "0.1.0"\n',
        **(files or {}),
        "albatross/_native/_build.json": json.dumps(build).encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    if build["library"]:
        content[f"albatross/_native/{build['library']}"] = code
    content[f"{info}/RECORD"] = _record_of(content, f"{info}/RECORD")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"albatross_rwkv-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6)), data)
    return read_wheel(path)


def change_member(path: Path, name: str, content: bytes | None) -> None:
    """Put other content in the place of a member, take it out (None), or add it; RECORD stays as it is."""
    with zipfile.ZipFile(path) as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    if content is None:
        del members[name]
    else:
        members[name] = content
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)


def _record_of(content: dict[str, bytes], own: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(data)])
    writer.writerow([own, "", ""])
    return text.getvalue().encode()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
