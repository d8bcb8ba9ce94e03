"""`albatross build`: compiles the native library here, shows what became of each kernel, and says what the loader will take.

Knows nothing of flags and compilers, which are `albatross.build`'s, and loads torch only after a library has changed, to
ask the loader.
"""

import importlib.util
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import albatross
from albatross.build import jit, resources
from albatross.build.lock import build_lock
from albatross.build.native import Listener, Options, archs_of, compile_library, normalize_archs, writing
from albatross.build.sources import is_checkout, source_root
from albatross.build.toolchain import BuildError, find_toolchain
from albatross.cli.terminal import notes

NATIVE, ALL = "native", "all"
_WIDTH_OF_A_FILE = 160  # characters a line where no terminal sets it
_EXAMPLES = "80 (A100), 86 (A10, RTX 30), 89 (L40S, RTX 40), 90 (H100, H200), 100 (B200), 120 (RTX 50), or all of them: all"


def build(arch: str, *, is_jit: bool, shows_kernels: bool, is_debug: bool, jobs: int) -> None:
    """Build for `arch`. Raises BuildError."""
    options = Options(archs=resolve_archs(arch), is_debug=is_debug, jobs=jobs)
    start = time.perf_counter()
    with showing_progress() as listener:
        library, resource_folder = _build_cached(options, listener) if is_jit else _build_local(options, listener)
    seconds = time.perf_counter() - start
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    if listener.num_steps:
        ccache = ", with ccache" if shutil.which("ccache") else ""
        _say(console, f"Built {library} in {seconds:.1f} s ({listener.num_steps} steps{ccache}).")
    else:
        _say(console, f"Nothing to do: {library} is of these sources ({seconds:.2f} s).")
    compiled = resources.load(resource_folder)
    if shows_kernels:
        console.print(kernel_table(compiled))
    _say(console, spill_line(compiled))
    if is_jit:
        _say(console, f"To use it, set {_variable_for(library, options)}.")
    if listener.num_steps:
        _say(console, _loader_line())


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def resolve_archs(arch: str) -> str:
    """What `--arch` asks for, as `Options.archs` has it. Raises BadParameter for what is none, BuildError without a card."""
    if arch == ALL:
        return ""
    if arch != NATIVE:
        try:
            return normalize_archs(arch)
        except BuildError as error:
            raise typer.BadParameter(str(error), param_hint="--arch") from error
    capabilities = visible_capabilities()
    if not capabilities:
        raise BuildError(
            f"No NVIDIA card was found to build for: say what to build for by albatross build --arch, which may be {_EXAMPLES}."
        )
    return archs_of(capabilities)


def visible_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the cards that the driver shows. Its file is opened by itself, since its package loads torch."""
    path = Path(albatross.__file__).with_name("ops") / "_driver.py"
    spec = importlib.util.spec_from_file_location("albatross_driver", path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} was expected in this installation, but cannot be read: reinstall albatross-rwkv.")
    driver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(driver)
    return [card.capability for card in driver.list_cards(driver.open_driver())]


def _build_local(options: Options, listener: Listener) -> tuple[Path, Path]:
    """The library for the checkout that this package runs from, and the folder that knows of its kernels."""
    root = source_root()
    if root is None or not is_checkout(root):
        raise BuildError(
            "albatross build compiles a checkout, but this package was installed from a wheel: run albatross build --jit, which "
            "compiles the sources that came with it."
        )
    toolchain = find_toolchain()
    target = root / "build" / "local"
    folder = target / ("cmake-debug" if options.is_debug else "cmake")
    mend = "give this user the right to write there, or run albatross build --jit"
    with writing(mend), build_lock(target / "lock", listener.message):
        record = compile_library(toolchain, root, folder, target, options, listener)
    return target / record["library"], folder


def _build_cached(options: Options, listener: Listener) -> tuple[Path, Path]:
    folder = jit.build_cached(jit.make_plan(options), listener)
    return folder / jit.read_record(folder)["library"], folder


class ProgressListener(Listener):
    """Shows the steps as a bar, or, where nobody looks on, as lines."""

    def __init__(self, progress: Progress) -> None:
        self.num_steps = 0
        self._progress = progress
        self._task = progress.add_task("setting up", total=None)

    def step(self, done: int, total: int, text: str) -> None:
        self.num_steps += 1
        what = resources.source_of(text) or text
        self._progress.update(self._task, completed=done, total=total, description=what)
        if not self._progress.console.is_terminal:
            self.message(f"[{done}/{total}] {what}")

    def message(self, line: str) -> None:
        self._progress.console.print(line, markup=False, soft_wrap=True)


@contextmanager
def showing_progress() -> Iterator[ProgressListener]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        yield ProgressListener(progress)


def kernel_table(compiled: list[resources.Compiled]) -> Table:
    """A row for each kernel and architecture, by file; what spills is red."""
    table = Table("kernel", "arch", box=None, pad_edge=False)
    for name in ("regs", "stack", "stores", "loads", "shared"):
        table.add_column(name, justify="right")
    for source, seconds, kernels in compiled:
        table.add_row(Text(f"{source}, {seconds:.1f} s", style="bold"))
        for kernel, name in zip(kernels, resources.readable([kernel.name for kernel in kernels]), strict=True):
            numbers = (kernel.registers, kernel.stack, kernel.spill_stores, kernel.spill_loads, kernel.shared)
            table.add_row(Text(f"  {name}"), kernel.arch, *map(str, numbers), style="red" if kernel.spills else None)
    table.caption = "stack, spill stores and loads: bytes a thread; shared: bytes a block"
    return table


def spill_line(compiled: list[resources.Compiled]) -> str:
    kernels = [kernel for entry in compiled for kernel in entry.kernels]
    spilling = [kernel for kernel in kernels if kernel.spills]
    seconds = ", ".join(f"{Path(entry.source).name} {entry.seconds:.1f} s" for entry in compiled)
    if not spilling:
        most = max((kernel.registers for kernel in kernels), default=0)
        return f"No spills in {len(kernels)} kernels, at most {most} registers ({seconds})."
    names = resources.readable([kernel.name for kernel in spilling])
    listed = ", ".join(f"{name} for {kernel.arch}" for kernel, name in zip(spilling, names, strict=True))
    return f"{len(spilling)} of {len(kernels)} kernels spill registers: {listed} ({seconds})."


def _variable_for(library: Path, options: Options) -> str:
    """The loader looks in the cache for what it would build itself; anything else must be named."""
    capabilities = visible_capabilities()
    is_its_own = bool(capabilities) and options == Options(archs_of(capabilities), jobs=options.jobs)
    return "ALBATROSS_JIT=1" if is_its_own else f"ALBATROSS_LIB={shlex.quote(str(library))}"


def _loader_line() -> str:
    try:
        from albatross.ops import _loader
    except (ImportError, OSError) as error:
        return f"What the loader will choose is not known, because torch does not import ({error}): see albatross doctor."
    decision = _loader.decide(_loader.current_context())
    if decision.chosen is None:
        return f"The loader will take none: {decision.error()}"
    return f"The loader will take the {decision.chosen.origin}: {decision.chosen.path or 'built when it is first needed'}"
