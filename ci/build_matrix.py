"""Builds the wheels of manifest/matrix.toml that this machine can build into dist/, and says of every other one why not.

    python ci/build_matrix.py                      those that are built without being named
    python ci/build_matrix.py --only 'C-torch2.9-*-cp312-*'
    python ci/build_matrix.py --list               what would become of each, building nothing

A wheel whose sources, tools and inputs have not changed is kept. Ends with 1 if one that was to be built is not there.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from queue import SimpleQueue

from build_cell import Builder, Built, CellProblem, Step, log_path
from build_inputs import InputProblem, Inputs
from matrix import Cell, Machine, Matrix, Plan, plan, read_matrix
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

CORES_A_CELL = 8  # a cell has about as many files to compile
COLOURS = {"built": "green", "kept": "green", "can be built": "cyan", "failed": "red", "refused": "yellow", "if named": "dim"}


@dataclass(frozen=True)
class Outcome:
    """What became of one cell, or of a group of them that have it in common."""

    cells: tuple[Cell, ...]
    state: str  # a key of COLOURS
    text: str  # the wheel's name, the reason, or the problem and the log
    built: Built | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="CELL", action="append", help="build these alone; may hold * and ?, and be repeated")
    parser.add_argument("--jobs", metavar="N", type=int, help="cells at once, each with its share of the cores")
    parser.add_argument("--list", action="store_true", help="build nothing, and name every cell")
    options = parser.parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs must be at least 1, found {options.jobs}")
    matrix = read_matrix()
    inputs = Inputs(matrix)
    machine = inputs.machine()
    chosen = choose(matrix, machine, options.only)
    if not chosen:
        parser.error(f"the matrix has no cell like {' or '.join(options.only)}: --list names them all")
    # A table has to tell everything also where nobody resizes a window: in a log.
    console = Console(width=None if sys.stdout.isatty() else 240)
    if options.list:
        rest = [] if options.only else [cell for cell in matrix.cells.values() if cell not in chosen]
        planned = [(cell, plan(matrix, cell, machine)) for cell in [*chosen, *rest]]
        show(console, [foresee(cell, fate) for cell, fate in planned])
        return 0
    buildable = [cell for cell in chosen if plan(matrix, cell, machine).action != "refused"]
    outcomes = build_all(console, matrix, inputs, buildable, options.jobs)
    rest = chosen if options.only else list(matrix.cells.values())
    outcomes += group((cell, plan(matrix, cell, machine)) for cell in rest if cell not in buildable)
    show(console, outcomes)
    is_good = all(outcome.built for outcome in outcomes[: len(buildable)]) and bool(buildable)
    return 0 if is_good else 1


def choose(matrix: Matrix, machine: Machine, patterns: Sequence[str] | None) -> list[Cell]:
    """The cells to build: those the patterns name, whether or not they can be built; else the default ones that can."""
    if patterns:
        return [cell for cell in matrix.cells.values() if any(fnmatchcase(cell.key, pattern) for pattern in patterns)]
    return [cell for cell in matrix.cells.values() if plan(matrix, cell, machine).action == "build"]


def build_all(console: Console, matrix: Matrix, inputs: Inputs, cells: Sequence[Cell], jobs: int | None) -> list[Outcome]:
    """Build the cells, `jobs` at a time, else as many as the cores are enough for. A failure ends that cell alone."""
    cores = len(os.sched_getaffinity(0))
    num_slots = max(1, min(jobs or cores // CORES_A_CELL, len(cells)))
    builders: SimpleQueue[Builder] = SimpleQueue()
    for slot in range(num_slots):
        builders.put(Builder(matrix, inputs, slot, max(1, cores // num_slots)))
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[stage]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, ThreadPoolExecutor(num_slots) as pool:

        def build(cell: Cell) -> Outcome:
            builder = builders.get()
            task = progress.add_task(cell.key, total=1.0, stage="")

            def step(stage: str, done: float) -> None:
                progress.update(task, stage=stage, completed=done)

            try:
                outcome = build_one(builder, cell, step)
            finally:
                builders.put(builder)
                progress.remove_task(task)
            progress.console.print(f"[{COLOURS[outcome.state]}]{outcome.state:7}[/] {cell.key}", highlight=False)
            return outcome

        return list(pool.map(build, cells))


def build_one(builder: Builder, cell: Cell, step: Step) -> Outcome:
    try:
        built = builder.build(cell, step)
    except (CellProblem, InputProblem) as problem:
        return Outcome((cell,), "failed", f"{problem}; its log is {_short(log_path(cell))}")
    return Outcome((cell,), "kept" if built.is_kept else "built", built.wheel.name, built)


def foresee(cell: Cell, fate: Plan) -> Outcome:
    """What building would come to."""
    states = {"build": "can be built", "named": "if named", "refused": "refused"}
    return Outcome((cell,), states[fate.action], fate.reason or "")


def group(planned: Iterable[tuple[Cell, Plan]]) -> list[Outcome]:
    """Cells that were not built, those of one reason together, in the order of the matrix."""
    cells: dict[tuple[str, str], list[Cell]] = {}
    for cell, fate in planned:
        # A reason that ends with the cell's own name is the same for all that could be named.
        reason = (fate.reason or "").replace(cell.key, "NAME")
        cells.setdefault(("if named" if fate.action == "named" else "refused", reason), []).append(cell)
    return [Outcome(tuple(members), state, reason) for (state, reason), members in cells.items()]


def show(console: Console, outcomes: Iterable[Outcome]) -> None:
    table = Table(title="Cells of manifest/matrix.toml", expand=False)
    for heading in ("cell", "", "s", "MB", "wheel, or why there is none"):
        table.add_column(heading, justify="right" if heading in ("s", "MB") else "left", overflow="fold")
    for outcome in outcomes:
        built = outcome.built
        figures = (f"{built.seconds:.0f}", f"{built.size_bytes / 1e6:.1f}") if built else ("", "")
        table.add_row(describe(outcome.cells), f"[{COLOURS[outcome.state]}]{outcome.state}[/]", *figures, outcome.text)
    console.print(table)


def describe(cells: Sequence[Cell]) -> str:
    """One cell by its key; several by what they have, axis by axis, and their number."""
    if len(cells) == 1:
        return cells[0].key
    axes = [
        ",".join(dict.fromkeys(cell.lane for cell in cells)),
        "torch" + _ends(cell.torch for cell in cells),
        "cu" + _ends(cell.cuda.replace(".", "") for cell in cells),
        _ends(cell.python_abi for cell in cells),
        ",".join(dict.fromkeys(cell.platform for cell in cells)),
    ]
    return f"{' '.join(axes)} ({len(cells)})"


def _ends(values: Iterable[str]) -> str:
    """The least and the greatest, by the numbers in them."""
    ordered = sorted(set(values), key=lambda value: [int(number) for number in re.findall(r"\d+", value)])
    return "..".join(dict.fromkeys([ordered[0], ordered[-1]]))


def _short(path: Path) -> str:
    """The path as it is typed from here."""
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
