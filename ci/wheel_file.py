"""Reads finished wheels: their names, digests, build record and library, and whether the archive is what its RECORD says.

Opens no library and knows nothing of torch. `verify_wheel.py`, `make_manifest.py` and `make_index.py` call it.
"""

import base64
import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

RECORD_NAME = "albatross/_native/_build.json"
BUILD_SCHEMA = 2  # layout of the build record
UNHASHED = ("RECORD", "RECORD.jws", "RECORD.p7s")  # files of the .dist-info folder that RECORD lists without a digest


class WheelError(Exception):
    """A file is no wheel of ours; the text says what was expected and what was found."""


@dataclass(frozen=True)
class Wheel:
    """One wheel. `build` is its `_build.json`; library_bytes is the size of the library, 0 where there is none."""

    path: Path
    sha256: str
    size_bytes: int
    distribution: str  # as in "albatross-rwkv"
    version: str  # with its label, as in "0.1.0+cu130.stable210"
    python_tag: str  # as in "py3"
    abi_tag: str  # as in "none" or "cp312"
    platforms: tuple[str, ...]  # as in ("manylinux_2_28_x86_64",), the most demanding last
    build: dict[str, Any]
    library_sha256: str | None
    library_bytes: int

    @property
    def label(self) -> str:
        """What stands after the plus sign of the version, or nothing."""
        return self.version.partition("+")[2]

    @property
    def requires_python(self) -> str | None:
        found = re.search(r"^Requires-Python: (.+)$", read_metadata(self.path).decode(), re.MULTILINE)
        return found.group(1).strip() if found else None


def read_wheel(path: Path) -> Wheel:
    """Raises WheelError where the file is no wheel, or holds no build record of a layout that is known."""
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
        content = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            build = json.loads(archive.read(RECORD_NAME))
            library = archive.read(library_member(build)) if build.get("library") else None
    except (InvalidWheelFilename, zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise WheelError(f"{path} is no wheel of albatross-rwkv: {error}.") from error
    if build.get("schema") != BUILD_SCHEMA:
        raise WheelError(f"{path} has a build record of layout {build.get('schema')}, expected {BUILD_SCHEMA}: build it again.")
    pythons, abis = ({getattr(tag, part) for tag in tags} for part in ("interpreter", "abi"))
    return Wheel(
        path, sha256_of(content), len(content), str(name), str(version), ".".join(sorted(pythons)), ".".join(sorted(abis)),
        tuple(sorted({tag.platform for tag in tags}, key=_platform_order)), build,
        None if library is None else sha256_of(library), len(library or b""),
    )


def read_wheels(paths: Iterable[Path]) -> list[Wheel]:
    """In the order of their names, which no file system decides."""
    return [read_wheel(path) for path in sorted(paths, key=lambda path: path.name)]


def library_member(build: dict[str, Any]) -> str:
    return f"albatross/_native/{build['library']}"


def read_metadata(path: Path) -> bytes:
    """The METADATA file."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return archive.read(name)


def extract_native(path: Path, folder: Path) -> Path:
    """Unpack the library and its record side by side into `folder`; returns the library's path."""
    with zipfile.ZipFile(path) as archive:
        build = json.loads(archive.read(RECORD_NAME))
        (folder / "_build.json").write_bytes(archive.read(RECORD_NAME))
        library = folder / Path(build["library"]).name
        library.write_bytes(archive.read(library_member(build)))
    return library


def record_problems(path: Path) -> list[str]:
    """One sentence for each way in which the archive is not what its RECORD says, or the library not what the build said."""
    with zipfile.ZipFile(path) as archive:
        (record,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
        rows = {row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(archive.read(record).decode())) if row}
        info = record.rpartition("/")[0]
        unhashed = {f"{info}/{name}" for name in UNHASHED}
        names = [name for name in archive.namelist() if not name.endswith("/")]
        found = [f"{name} is in the archive, but not in RECORD." for name in names if name not in rows]
        found += [f"{name} is in the archive twice." for name in sorted({name for name in names if names.count(name) > 1})]
        found += [f"{name} is in RECORD, but not in the archive." for name in rows if name not in names]
        for name in names:
            if name in rows and name not in unhashed and rows[name] != _record_entry(archive.read(name)):
                found.append(f"{name} is not the file that RECORD tells of: its digest or size differs.")
        build = json.loads(archive.read(RECORD_NAME))
        if build["library"] and sha256_of(archive.read(library_member(build))) != build["sha256"]:
            found.append(f"{library_member(build)} is not the file that was built: its SHA-256 differs.")
    return found


def name_problems(wheel: Wheel) -> list[str]:
    """One sentence for each way in which the file's name says something else than the record in it."""
    build = wheel.build
    wanted = "py3-none" if build["python_abi"] == "none" else "{0}-{0}".format(build["python_abi"])
    found = f"{wheel.python_tag}-{wheel.abi_tag}"
    architecture = build["platform"].partition("_")[2]
    checks = [
        (found != wanted, f"Its tags are {found}, expected {wanted}."),
        (
            not all(platform.endswith(architecture) for platform in wheel.platforms),
            f"Its platform is {'.'.join(wheel.platforms)}, but the library was built for {build['platform']}.",
        ),
        (
            wheel.version.partition("+")[0] != build["version"].partition("+")[0],
            f"Its version is {wheel.version}, but the library was built for {build['version']}.",
        ),
    ]
    return [text for is_wrong, text in checks if is_wrong]


def requirement_problems(wheel: Wheel) -> list[str]:
    """One sentence if pip, by the wheel's metadata, would take a torch that its library refuses, or refuse one that it serves."""
    torch = wheel.build["torch"]
    lines = re.findall(r"^Requires-Dist: (.+)$", read_metadata(wheel.path).decode(), re.MULTILINE)
    found = next((requirement for requirement in map(Requirement, lines) if requirement.name == "torch"), None)
    if found is None:
        return ["It does not ask for torch."]
    first, last = (tuple(map(int, version.split("."))) for version in (torch["min"], torch["max"] or torch["min"]))
    refused = [f"{first[0]}.{first[1] - 1}.0"] + ([f"{last[0]}.{last[1] + 1}.0"] if torch["max"] else [])
    wrong = [version for version in refused if version in found.specifier]
    if not wrong and f"{torch['min']}.0" in found.specifier:
        return []
    wanted = f"{torch['min']} alone" if torch["max"] else f"{torch['min']} or later"
    return [f"It asks for torch{found.specifier}, but its library is for torch {wanted}."]


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _record_entry(content: bytes) -> tuple[str, str]:
    """Digest and size as RECORD writes them."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(content))


def _platform_order(platform: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"(?<=_)\d+(?=_)", platform)))
