"""What all benchmarks share: repeated measurement, the description of the machine, and the report.

Knows nothing of what is measured. Each benchmark makes a list of `Result` and hands it to `write_report`.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Result:
    """One figure. `bound` is what it is held against: a physical limit, or a bound that a test or the design sets; `target`
    is what it is to reach, where that is another number; `details` is whatever explains it."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    target: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.bound is None else self.value / self.bound


@dataclass(frozen=True)
class Measured:
    """The median of repeats and their extremes."""

    median: float
    low: float
    high: float

    def as_result(self, name: str, unit: str, bound: float | None = None, details: dict[str, Any] | None = None) -> Result:
        return Result(name, self.median, unit, bound, {**(details or {}), "low": self.low, "high": self.high})


def summarise(values: Sequence[float]) -> Measured:
    return Measured(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` of all values do not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]


def time_on_host(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call by the host's clock, after one that is not counted."""
    call()
    marks = [time.perf_counter()]
    for _ in range(repeats):
        call()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(marks)]


def pin_to_core(core: int) -> None:
    """Keeps this thread, and those it starts, on one core, where the system can do so and has that core."""
    if hasattr(os, "sched_setaffinity") and core < (os.cpu_count() or 1):
        os.sched_setaffinity(0, {core})


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, help="write machine and results to this JSON file")
    return parser


def write_report(results: Sequence[Result], out: Path | None) -> None:
    """Shows the results as a table, and writes them to `out` together with the machine they were measured on."""
    table = Table("figure", "value", "unit", "bound", "ratio", "target")
    for result in results:
        bound, target = ("" if value is None else f"{value:,.4g}" for value in (result.bound, result.target))
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        table.add_row(result.name, f"{result.value:,.4g}", result.unit, bound, ratio, target)
    Console().print(table)
    if out is not None:
        rows = [{**asdict(result), "ratio": result.ratio} for result in results]
        out.write_text(json.dumps({"machine": describe_machine(), "results": rows}, indent=1) + "\n")


def describe_machine() -> dict[str, Any]:
    """Where and when, and at which commit of this repository ("+" after it: with changes that are not committed).

    COMMIT in the environment names it where the files lie outside a repository.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "gpus": _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", "uvicorn", "uvloop", "pyzmq") if _is_installed(name)},
    }


def _commit() -> str:
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    commit = _run("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return commit + "+" if commit and _run("git", "-C", str(ROOT), "status", "--porcelain") else commit


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _run(*command: str) -> str:
    """What a program says, or nothing if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _is_installed(distribution: str) -> bool:
    return any(metadata.distributions(name=distribution))
