"""What has been seen of the built libraries: manifest/checks.json, keyed by the library's digest, so that it stays true exactly
as long as the library's bytes do.

`verify_wheel.py` adds to it, `make_manifest.py` reads it. Knows nothing of how a check is done.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LEVELS = ("not-built", "built", "link-checked", "loaded", "run")  # each includes the ones before it
CHECKS = Path(__file__).resolve().parents[1] / "manifest" / "checks.json"


@dataclass(frozen=True)
class Check:
    """That one library reached a level in one torch. `what` is the command that showed it."""

    library: str  # SHA-256 of the file
    torch: str  # as in "2.13.0+cpu"
    python: str  # as in "cp311"
    machine: str  # "cpu" or the card's name
    arch: str | None  # of the card, as in "sm_90"
    level: str
    date: str  # as in "2026-11-30"
    what: str

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What a later check replaces."""
        return self.library, self.torch, self.python, self.machine

    @property
    def torch_minor(self) -> str:
        return minor(self.torch)

    @property
    def torch_label(self) -> str:
        """"cu130" of "2.14.1+cu130"."""
        return self.torch.partition("+")[2]


def minor(version: str) -> str:
    """"2.13" of "2.13.0+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def read_checks(path: Path = CHECKS) -> list[Check]:
    """Empty where there is no such file."""
    return _sorted(Check(**entry) for entry in json.loads(path.read_text())) if path.is_file() else []


def write_checks(path: Path, added: Iterable[Check], failed: Iterable[tuple[str, str, str, str]] = ()) -> None:
    """Add checks, of which the highest of a place stays and the later of equal ones, and take away those whose places failed."""
    best: dict[tuple[str, str, str, str], Check] = {}
    for check in (*read_checks(path), *added):
        earlier = best.get(check.place)
        if earlier is None or LEVELS.index(check.level) >= LEVELS.index(earlier.level):
            best[check.place] = check
    lost = set(failed)
    checks = _sorted(check for check in best.values() if check.place not in lost)
    path.write_text(json.dumps([asdict(check) for check in checks], indent=1) + "\n")


def _sorted(checks: Iterable[Check]) -> list[Check]:
    return sorted(checks, key=lambda check: check.place)


def highest(levels: Sequence[str]) -> str:
    return max(levels, key=LEVELS.index)
