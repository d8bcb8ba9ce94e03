"""Where the sources of the native library lie, and the digest that tells whether a library was built from them.

Knows nothing of compilers. A checkout has the sources in its tree, a wheel ships the same files in `albatross/_source`; the
digest is the same for both. Called by the builder, and by the loader to find out whether a local build is stale.
"""

import hashlib
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED_FOLDER = "_source"
_CONSTANTS = "constants.py"


def source_root() -> Path | None:
    """The checkout that this package runs from, else the sources its wheel shipped, else None (an installation without them)."""
    checkout, shipped = _PACKAGE.parents[1], _PACKAGE / SHIPPED_FOLDER
    if is_checkout(checkout) and checkout / "python" == _PACKAGE.parent:
        return checkout
    return shipped if (shipped / "CMakeLists.txt").is_file() else None


def is_checkout(root: Path) -> bool:
    """Whether `root` is a working copy, and not the sources in a wheel."""
    return (root / "setup.py").is_file() and (root / "python" / "albatross").is_dir()


def source_files(root: Path) -> dict[str, Path]:
    """All that the library is made of, by its name in a wheel's `_source`, sorted."""
    folder = root / "python" / "albatross" if is_checkout(root) else root
    csrc = {path.relative_to(root).as_posix(): path for path in (root / "csrc").rglob("*") if _is_source(path)}
    return dict(sorted({**csrc, "CMakeLists.txt": root / "CMakeLists.txt", _CONSTANTS: folder / _CONSTANTS}.items()))


def _is_source(path: Path) -> bool:
    """No notes, and nothing that an editor leaves behind."""
    return path.suffix != ".md" and not path.name.startswith(".") and not path.name.endswith("~") and path.is_file()


def source_digest(root: Path) -> str:
    """SHA-256 over the names and contents of all sources, as hexadecimal digits. Raises OSError if one cannot be read."""
    digest = hashlib.sha256()
    for name, path in source_files(root).items():
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def listed_ops(root: Path) -> list[str]:
    """The ops that the library implements, sorted."""
    text = (root / "csrc" / "op_list.h").read_text(encoding="utf-8")
    return sorted(re.findall(r"DO\((\w+)\)", text))
