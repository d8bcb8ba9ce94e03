"""`albatross manifest`: what the installed native library is, and in a checkout which wheels there are and whom each serves.

Reads the build record of the installed package and manifest/wheels.json of a checkout; builds, opens and imports nothing, so it
works where torch does not. Knows nothing of this machine's cards: `albatross doctor` does.
"""

import base64
import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from albatross.build.sources import is_checkout, source_root
from albatross.errors import NativeLibraryError

DISTRIBUTION = "albatross-rwkv"
NATIVE = Path(__file__).resolve().parents[1] / "_native"
AXES = ("name", "torch", "cuda", "python_abi", "platform", "arch")
SCHEMA, BUILD_SCHEMA = 1, 2  # layouts of wheels.json and of the build record
Entry = dict[str, Any]


@dataclass(frozen=True)
class Manifests:
    """What there is to read. `record` is that of the package in use, `wheels` the content of manifest/wheels.json.

    `problem` says why there is no record to use, where a checkout's manifest is there all the same.
    """

    native: Path
    record: Entry | None
    checkout: Path | None
    wheels: Entry | None
    problem: str | None = None


def read_manifests(native: Path = NATIVE) -> Manifests:
    """Raises NativeLibraryError where there is neither, or a manifest that cannot be understood."""
    root = source_root()
    checkout = root if root is not None and is_checkout(root) else None
    path = checkout / "manifest" / "wheels.json" if checkout else None
    wheels = _read(path, SCHEMA) if path is not None and path.is_file() else None
    try:
        return Manifests(native, _read(native / "_build.json", BUILD_SCHEMA), checkout, wheels)
    except NativeLibraryError as error:
        if wheels is None:
            raise
        return Manifests(native, None, checkout, wheels, str(error))


def _read(path: Path, schema: int) -> Entry:
    try:
        content = json.loads(path.read_bytes())
        found = content["schema"]
    except FileNotFoundError as error:
        raise NativeLibraryError(f"{path} does not exist: install albatross-rwkv, or run albatross build.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NativeLibraryError(f"{path} cannot be read as a manifest ({error}): reinstall albatross-rwkv.") from error
    if found != schema:
        advice = "upgrade albatross-rwkv" if isinstance(found, int) and found > schema else "reinstall albatross-rwkv"
        raise NativeLibraryError(f"{path} has layout {found}, but this version reads layout {schema}: {advice}.")
    return dict(content)


def show(manifests: Manifests, console: Console) -> None:
    """Print the installed library and the wheels."""
    if manifests.problem is not None:
        console.print(Text(manifests.problem))
    if manifests.record is not None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in _record_lines(manifests.record):
            table.add_row(name, Text(text))
        console.print(table)
    if manifests.wheels is not None:
        table = Table("wheel", "torch", "cuda", "python", "code", "MB", "level")
        for wheel in manifests.wheels["wheels"]:
            code = ", ".join([*wheel["arch"], *(f"PTX {name}" for name in wheel["ptx"])])
            texts = (_torch_text(wheel["torch"]), _cuda_text(wheel["cuda"]), wheel["python_abi"], code)
            table.add_row(wheel["file"], *texts, f"{wheel['size_bytes'] / 1e6:.1f}", wheel["level"])
        console.print(table)


def _record_lines(record: Entry) -> list[tuple[str, str]]:
    head = [("installed", f"{record['name']} of albatross {record['version']}")]
    if record["library"] is None:
        return [*head, ("library", f"none, because {record['why']}")]
    return [
        *head,
        ("library", record["library"]),
        ("torch", f"{_torch_text(record['torch'])} ({record['torch']['abi']} ABI), built with {record['torch']['built_with']}"),
        ("cuda", _cuda_text(record["cuda"])),
        ("python", "any" if record["python_abi"] == "none" else record["python_abi"]),
        ("platform", record["platform"]),
        ("code", ", ".join([*record["arch"], *(f"PTX {name}" for name in record["ptx"])])),
        ("ops", ", ".join(record["ops"])),
        ("sources", record["source"]),
        ("sha256", record["sha256"]),
    ]


def _torch_text(torch: Entry) -> str:
    return f"{torch['min']} or later" if torch["max"] is None else str(torch["max"])


def _cuda_text(cuda: Entry) -> str:
    return f"{cuda['toolkit']}, driver {cuda['driver_min']} or later"


def verify(manifests: Manifests) -> Iterator[tuple[str, str | None]]:
    """Each thing that was looked at, with what is wrong with it, if anything: files against the digests written of them."""
    if manifests.problem is not None:
        yield "installed library", manifests.problem
    if manifests.record is not None:
        yield "installed library", _library_problem(manifests.native, manifests.record)
        problems = list(_file_problems())
        yield "installed files", " ".join(problems) or None
    if manifests.wheels is not None and manifests.checkout is not None:
        for wheel in manifests.wheels["wheels"]:
            path = manifests.checkout / "dist" / wheel["file"]
            if path.is_file():
                yield wheel["file"], _digest_problem(path, wheel["sha256"])
        yield "cells", _cells_problem(manifests.wheels)


def _library_problem(native: Path, record: Entry) -> str | None:
    if record["library"] is None:
        return f"There is none, because {record['why']}: install a wheel that has it, or run albatross build."
    return _digest_problem(native / record["library"], record["sha256"])


def _digest_problem(path: Path, sha256: str) -> str | None:
    if not path.is_file():
        return f"{path} does not exist: reinstall albatross-rwkv."
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return None if found == sha256 else f"{path} is not the file that was built: its SHA-256 is {found}, expected {sha256}."


def _file_problems() -> Iterator[str]:
    """Files of the installed distribution that are not what its RECORD says. None where it runs from a work tree."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.hash is None:
            continue
        path = Path(str(file.locate()))
        if not path.is_file():
            yield f"{path} is missing."
            continue
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            yield f"{path} was changed after it was installed."


def _cells_problem(wheels: Entry) -> str | None:
    files = {wheel["file"] for wheel in wheels["wheels"]}
    unanswered = [cell for cell in wheels["cells"] if cell["wheel"] not in files and not cell["why"]]
    return f"{len(unanswered)} cells have neither a wheel nor a reason: run python ci/make_manifest.py." if unanswered else None


def expand(manifests: Manifests) -> Iterator[Entry]:
    """Six-tuples with `wheel`, `level` and `why`: all of the manifest in a checkout, else those the installed library serves."""
    if manifests.wheels is not None:
        for cell in manifests.wheels["cells"]:
            for values in itertools.product(*(cell[axis] for axis in AXES)):
                yield {**dict(zip(AXES, values, strict=True)), **{key: cell[key] for key in ("wheel", "level", "why")}}
    elif manifests.record is not None:
        record = manifests.record
        if record["library"] is None:
            raise NativeLibraryError(f"There is no native library here, because {record['why']}: install a wheel that has it.")
        torch = f"{record['torch']['min']}+" if record["torch"]["max"] is None else record["torch"]["max"]
        cuda = ".".join(record["cuda"]["toolkit"].split(".")[:2])
        for arch in [*record["arch"], *(f"{name.replace('compute', 'sm')}+" for name in record["ptx"])]:
            values = (record["name"], torch, cuda, record["python_abi"], record["platform"], arch)
            outcome = {"wheel": f"{DISTRIBUTION} {record['version']}", "level": "installed", "why": None}
            yield {**dict(zip(AXES, values, strict=True)), **outcome}


def matching(rows: Iterable[Entry], wanted: Mapping[str, str | None]) -> Iterator[Entry]:
    """The rows with the wanted value on each axis for which one is given."""
    for row in rows:
        if all(value is None or row[axis] == value for axis, value in wanted.items()):
            yield row


def line_of(row: Entry) -> str:
    """A six-tuple and its answer on one line."""
    answer = f"{row['wheel']} ({row['level']})" if row["wheel"] else f"none: {row['why']}"
    return f"{'  '.join(row[axis] for axis in AXES)}  {answer}"
