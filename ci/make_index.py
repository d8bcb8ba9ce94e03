"""Writes a static package index of the finished wheels that pip installs from: PEP 503 pages, PEP 691 JSON, PEP 658 metadata.

    python ci/make_index.py [--dist FOLDER] [--out FOLDER]
    python -m http.server --directory dist/index
    pip install --extra-index-url http://127.0.0.1:8000/cu130/ albatross-rwkv

One index a CUDA label, as dist/index/cu130, for the wheel that serves every torch; each wheel for one torch has its own, as
cu130-torch211, or pip would take its version for the later one. Every folder can be put on any web server as it is.
"""

import argparse
import html
import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from make_manifest import collect
from matrix import MATRIX_FILE, read_matrix
from packaging.utils import canonicalize_name
from packaging.version import Version
from wheel_file import Wheel, WheelError, read_metadata, sha256_of

ROOT = Path(__file__).resolve().parents[1]
API_VERSION = "1.1"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="pypi:repository-version" content="{version}"><title>{title}</title></head>
<body>
<h1>{title}</h1>
{links}
</body>
</html>
"""


def write_index(wheels: Iterable[Wheel], out: Path) -> list[Path]:
    """Fill `out` anew; returns the folder of each index. Wheels stand beside their page, linked if possible."""
    shutil.rmtree(out, ignore_errors=True)
    by_label: dict[str, list[Wheel]] = {}
    for wheel in wheels:
        by_label.setdefault(index_label(wheel), []).append(wheel)
    for label, members in sorted(by_label.items()):
        _write_one(members, out / label)
    return [out / label for label in sorted(by_label)]


def index_label(wheel: Wheel) -> str:
    """"cu130" for the wheel of the stable ABI, "cu130-torch211" for one of a single torch."""
    cuda, _, rest = wheel.label.partition(".")
    return cuda if wheel.build["torch"]["abi"] == "stable" else f"{cuda}-{rest}"


def _write_one(wheels: list[Wheel], folder: Path) -> None:
    projects: dict[str, list[Wheel]] = {}
    for wheel in wheels:
        projects.setdefault(canonicalize_name(wheel.distribution), []).append(wheel)
    for name, members in projects.items():
        page = folder / name
        page.mkdir(parents=True)
        files = [_add_file(wheel, page) for wheel in sorted(members, key=lambda wheel: wheel.path.name)]
        links = "\n".join(map(_link, files))
        (page / "index.html").write_text(PAGE.format(version=API_VERSION, title=f"Links for {name}", links=links))
        versions = sorted({wheel.version for wheel in members}, key=Version)
        _write_json(page / "index.json", {"name": name, "versions": versions, "files": files})
    names = sorted(projects)
    links = "\n".join(f'<a href="{name}/">{name}</a><br>' for name in names)
    (folder / "index.html").write_text(PAGE.format(version=API_VERSION, title="Packages", links=links))
    _write_json(folder / "index.json", {"projects": [{"name": name} for name in names]})


def _add_file(wheel: Wheel, page: Path) -> dict[str, Any]:
    """Put the wheel and its metadata beside the page; returns its entry of the JSON."""
    target, metadata = page / wheel.path.name, read_metadata(wheel.path)
    try:
        os.link(wheel.path, target)
    except OSError:  # another file system
        shutil.copyfile(wheel.path, target)
    target.with_name(target.name + ".metadata").write_bytes(metadata)
    return {
        "filename": target.name,
        "url": quote(target.name),
        "hashes": {"sha256": wheel.sha256},
        "size": wheel.size_bytes,
        "core-metadata": {"sha256": sha256_of(metadata)},
        **({"requires-python": wheel.requires_python} if wheel.requires_python else {}),
    }


def _link(file: dict[str, Any]) -> str:
    metadata = f"sha256={file['core-metadata']['sha256']}"
    attributes = {"href": f"{file['url']}#sha256={file['hashes']['sha256']}", "data-requires-python": file.get("requires-python")}
    attributes |= {"data-core-metadata": metadata, "data-dist-info-metadata": metadata}
    text = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items() if value)
    return f"<a {text}>{html.escape(file['filename'])}</a><br>"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps({"meta": {"api-version": API_VERSION}, **content}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--matrix", type=Path, default=MATRIX_FILE)
    parser.add_argument("--out", type=Path, help="folder to write (default: index, beside the wheels)")
    arguments = parser.parse_args()
    try:
        wheels, notes = collect(read_matrix(arguments.matrix), arguments.dist)
    except WheelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.writelines(f"{note}\n" for note in notes)
    for folder in write_index(wheels, arguments.out or arguments.dist / "index"):
        sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
