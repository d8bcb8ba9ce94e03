"""Which kernel computes a matrix product of [rows, K] by [N, K]: measured once per card and native library, and remembered.

A choice is looked up in what was measured on this card, then in the defaults that are shipped for its architecture
(`tuning_defaults.json`). Knows names of choices only, no kernels and no torch: `linear` measures and obeys, `albatross doctor`
shows. A cache that cannot be read or written costs a log line and no more.
"""

import contextlib
import json
import logging
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

CHOICES = ("rows", "cublas")  # every name a table may hold; others are left out when a file is read
CACHE_SCHEMA = 1  # layout of the cache files
ROUNDS = 5  # times each candidate is measured
MIN_GAIN = 0.02  # of the time of the first candidate: what another must save to be chosen in its place
_DEFAULTS = Path(__file__).with_name("tuning_defaults.json")
_DIGEST_CHARS = 12

Shape = tuple[int, int]  # N, K
Table = dict[Shape, dict[int, str]]  # by shape and number of rows


class Rule(NamedTuple):
    """What is taken for a shape of which nothing is known: `choice` up to `max_rows`, or beyond all other rules (None)."""

    choice: str
    max_rows: int | None = None


class Defaults(NamedTuple):
    """What is shipped for one architecture."""

    arch: str
    rules: tuple[Rule, ...]
    table: Table

    def choice(self, rows: int) -> str:
        return next(rule.choice for rule in self.rules if rule.max_rows is None or rows <= rule.max_rows)


class Tuning:
    """The choices of one card. `lookup` is for the hot path, `measure` for the start; `save` keeps what was measured."""

    def __init__(
        self, card: str, digest: str, defaults: Defaults, measured: Table | None = None, path: Path | None = None
    ) -> None:
        self.card = card
        self.digest = digest
        self.defaults = defaults
        self.measured: Table = measured or {}
        self.path = path  # of the cache; None where there is no folder for it
        self._known: dict[tuple[int, int, int], str] = {}

    def lookup(self, n: int, k: int, rows: int) -> str:
        """The choice for [rows, K] by [N, K]: that of the next larger number of rows in a table, else the rule's."""
        choice = self._known.get((n, k, rows))
        if choice is None:
            choice = self._known[n, k, rows] = self._resolve((n, k), rows)
        return choice

    def is_known(self, n: int, k: int, rows: int) -> bool:
        """Whether exactly these rows were measured on this card."""
        return rows in self.measured.get((n, k), {})

    def measure(self, n: int, k: int, rows: int, candidates: Sequence[str], time_fn: Callable[[str], float]) -> str:
        """The choice for exactly these rows, found by `choose` unless the cache has it already."""
        found = self.measured.get((n, k), {}).get(rows)
        if found is None or found not in candidates:
            found = choose(candidates, time_fn)
            self.measured.setdefault((n, k), {})[rows] = found
            self._known.clear()
        return found

    def save(self) -> None:
        """Writes what was measured; a folder that does not allow it costs a log line."""
        if self.path is None:
            return
        content = {"schema": CACHE_SCHEMA, "card": self.card, "digest": self.digest, "choices": _as_json(self.measured)}
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(content, indent=1) + "\n")
            os.replace(part, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            logger.warning("measured kernel choices were not kept: %s cannot be written (%s)", self.path, error.strerror)

    def describe(self) -> dict[str, Any]:
        """What is in use and where it comes from, as JSON-ready data."""
        return {
            "cache": None if self.path is None else str(self.path),
            "num_measured": sum(map(len, self.measured.values())),
            "measured": _as_json(self.measured),
            "defaults": self.defaults.arch,
            "shipped": _as_json(self.defaults.table),
            "rules": [rule._asdict() for rule in self.defaults.rules],
        }

    def _resolve(self, shape: Shape, rows: int) -> str:
        for table in (self.measured.get(shape, {}), self.defaults.table.get(shape, {})):
            larger = [size for size in table if size >= rows]
            if larger:
                return table[min(larger)]
        return self.defaults.choice(rows)


def choose(candidates: Sequence[str], time_fn: Callable[[str], float]) -> str:
    """The quickest of `candidates` by the median of ROUNDS measurements, taken in turns so that slow phases hit all alike.

    time_fn: seconds of one measurement. The first candidate stays unless another saves MIN_GAIN of its time.
    """
    if len(candidates) == 1:
        return candidates[0]
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, seconds in times.items():
            seconds.append(time_fn(name))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    quickest = min(candidates, key=medians.__getitem__)
    return quickest if medians[quickest] < medians[candidates[0]] * (1 - MIN_GAIN) else candidates[0]


def load_tuning(card: str, capability: tuple[int, int], digest: str, folder: Path | None = None) -> Tuning:
    """The choices for a card by its name and compute capability, and a native library by its SHA-256.

    folder: where the cache is, by default `cache_folder()`. Never fails: a cache that is no use is named in the log.
    """
    folder = folder or cache_folder()
    defaults = shipped_defaults(capability)
    if folder is None:
        logger.warning("measured kernel choices are not kept: this user has no home folder")
        return Tuning(card, digest, defaults)
    name = re.sub("[^a-z0-9]+", "-", card.lower()).strip("-")
    path = folder / f"tuning-{name}-{digest[:_DIGEST_CHARS]}.json"
    return Tuning(card, digest, defaults, _read_cache(path, card, digest), path)


def cache_folder() -> Path | None:
    """This user's folder for caches of ours, which need not exist; None if the system knows no home for the user."""
    try:
        if os.environ.get("XDG_CACHE_HOME"):
            return Path(os.environ["XDG_CACHE_HOME"], "albatross")
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "albatross", "cache")
        parts = ("Library", "Caches") if sys.platform == "darwin" else (".cache",)
        return Path.home().joinpath(*parts, "albatross")
    except RuntimeError:
        return None


@cache
def shipped_defaults(capability: tuple[int, int]) -> Defaults:
    """Those of the newest architecture that is not newer than the card, or else of the oldest."""
    content = json.loads(_DEFAULTS.read_text())
    older = [arch for arch in content if _capability(arch) <= capability]
    arch = max(older, key=_capability) if older else min(content, key=_capability)
    rules = tuple(Rule(**rule) for rule in content[arch]["rules"])
    return Defaults(arch, rules, _from_json(content[arch]["choices"]))


def _capability(arch: str) -> tuple[int, int]:
    """(9, 0) of "sm_90"."""
    digits = arch.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


def _read_cache(path: Path, card: str, digest: str) -> Table:
    try:
        content = json.loads(path.read_text())
        if (content["schema"], content["card"], content["digest"]) == (CACHE_SCHEMA, card, digest):
            return _from_json(content["choices"])
        problem = "it is of another card, library or version"
    except FileNotFoundError:
        return {}
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    logger.warning("%s is left aside and defaults are used: %s", path, problem)
    return {}


def _as_json(table: Mapping[Shape, Mapping[int, str]]) -> dict[str, dict[str, str]]:
    """{"4096x1024": {"1": "rows"}}, shapes as NxK, all in ascending order."""
    return {f"{n}x{k}": {str(rows): table[n, k][rows] for rows in sorted(table[n, k])} for n, k in sorted(table)}


def _from_json(choices: Mapping[str, Mapping[str, str]]) -> Table:
    table: Table = {}
    for shape, by_rows in choices.items():
        n, _, k = shape.partition("x")
        known = {int(rows): choice for rows, choice in by_rows.items() if choice in CHOICES}
        if known:
            table[int(n), int(k)] = known
    return table
