"""What ptxas told of each kernel: registers, stack, spills, shared memory; and how long each file took to compile.

Reads the compilers' output and ninja's log; knows nothing of how they are started. `native` keeps what it reads here in the
build folder, so that a build which compiles one file can still tell of all; `albatross build` shows it.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

FILE = "kernels.json"
_OBJECT = re.compile(r"\.dir/(\S.*)\.o$")
_ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '(\w+)' for '(\w+)'")
_STACK = re.compile(r"\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"ptxas info\s*: Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Kernel(NamedTuple):
    """One kernel of one architecture. Sizes are in bytes a thread; `shared` a block, without what a launch adds."""

    name: str  # as the compiler mangled it
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0


class Compiled(NamedTuple):
    """What is known of one .cu file: how long it took, of all architectures together, and its kernels."""

    source: str
    seconds: float
    kernels: list[Kernel]


def is_info(line: str) -> bool:
    """Whether a line only tells of resources, and so is no warning."""
    return line.startswith("ptxas info") or _STACK.fullmatch(line) is not None


def source_of(step: str) -> str | None:
    """The file that a step of ninja, or the object it makes, was compiled from."""
    found = _OBJECT.search(step)
    return found[1] if found else None


def parse(lines: Iterable[str]) -> list[Kernel]:
    """The kernels that the output of one file's compilation tells of. Device functions that were not inlined are left out."""
    kernels: list[Kernel] = []
    entry: tuple[str, str] | None = None
    stack = (0, 0, 0)
    for line in lines:
        if found := _ENTRY.match(line):
            entry = (found[1], found[2])
        elif found := _STACK.fullmatch(line):
            stack = (int(found[1]), int(found[2]), int(found[3]))
        elif entry and (found := _USED.match(line)):
            shared = _SHARED.search(line)
            kernels.append(Kernel(*entry, int(found[1]), *stack, int(shared[1]) if shared else 0))
            entry = None
    return kernels


def save(folder: Path, root: Path, outputs: dict[str, list[str]]) -> None:
    """Keep what the steps of a build said, beside what is known of the other files that `root` still has."""
    seconds = _compile_seconds(folder)
    known = {compiled.source: compiled for compiled in load(folder) if (root / compiled.source).is_file()}
    for step, lines in outputs.items():
        source = source_of(step)
        if source and source.endswith(".cu") and source in seconds:
            known[source] = Compiled(source, seconds[source], parse(lines))
    (folder / FILE).write_text(json.dumps(sorted(known.values()), indent=1), encoding="utf-8")


def load(folder: Path) -> list[Compiled]:
    """All that is known of the files compiled in a build folder, sorted by name."""
    try:
        content = json.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        return []
    return [Compiled(source, seconds, [Kernel(*kernel) for kernel in kernels]) for source, seconds, kernels in content]


def _compile_seconds(folder: Path) -> dict[str, float]:
    """How long the last compilation of each file took, by ninja's log. A file that does not compile is not in it."""
    seconds = {}
    log = folder / ".ninja_log"
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        start, end, _, output = (line.split("\t") + [""] * 4)[:4]
        source = source_of(output)
        if source:
            seconds[source] = (int(end) - int(start)) / 1000
    return seconds


def readable(names: Sequence[str]) -> list[str]:
    """Kernels' names as the sources have them, without namespaces and arguments; as they are where there is no c++filt."""
    filt = shutil.which("c++filt")
    if filt is None or not names:
        return list(names)
    plain = subprocess.run([filt], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    return [re.sub(r"(\w+::)+", "", re.sub(r"^void |\([^()]*\)$", "", name)) for name in plain]
