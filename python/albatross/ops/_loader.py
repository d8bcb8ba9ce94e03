"""Finds the native library, says why it is that one, and opens it once.

`current_context` asks the machine, `find_candidates` reads the records in the order in which they are to be considered, and
`_selection` decides from those two alone, before anything is opened. There is no silent fallback: without a usable library a
CUDA engine does not start, and the reference runs only if asked for by name. Writes nothing, unless a just-in-time build is
asked for.
"""

import importlib.machinery
import importlib.util
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from albatross import __version__
from albatross.build import sources
from albatross.errors import NativeLibraryError
from albatross.ops._driver import list_cards, open_driver, supported_cuda
from albatross.ops._manifest import (
    FORCED,
    LIBRARY_NAME,
    LOCAL,
    PACKAGE,
    RECORD_FILE,
    Build,
    Candidate,
    file_digest,
    mend_of,
    read_candidate,
)
from albatross.ops._selection import KERNEL_ARCH, Context, Decision, select

WANTS_JIT = "ALBATROSS_JIT"  # environment variable: 1 lets a library be built at start where none fits
VARIABLES = (FORCED, KERNEL_ARCH, WANTS_JIT)  # the environment variables that steer the choice
PACKAGE_FOLDER = Path(__file__).parents[1] / "_native"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The library this process opened."""

    name: str
    path: Path
    build: Build


def load_native(device: torch.device | str = "cuda") -> NativeLibrary:
    """Open the native library for one card, or return it if it is open. Adds the CUDA implementations of all ops.

    Raises UnsupportedGPUError if it cannot run on that card or driver, NativeLibraryError if there is none to use.
    """
    index = torch.device(device).index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return _load_for_card(index)


@cache
def _load_for_card(index: int) -> NativeLibrary:
    context = current_context(index)
    decision = decide(context)
    if decision.chosen is not None and decision.chosen.build is None:
        from albatross.ops import _jit

        _jit.build_library(context)
        decision = decide(context)
    if decision.chosen is None:
        raise decision.error()
    for verdict in decision.passed_over:
        logger.warning("A native library is passed over. %s", verdict)
    return open_library(decision.chosen)


def decide(context: Context) -> Decision:
    """`select` among what this installation has; the digest of a library is taken only once all else about it fits."""
    candidates = find_candidates(context)
    while True:
        decision = select(context, candidates)
        chosen = decision.chosen
        if chosen is None or chosen.build is None or chosen.sha256 is not None:
            return decision
        candidates = tuple(_with_digest(candidate) if candidate is chosen else candidate for candidate in candidates)


def _with_digest(candidate: Candidate) -> Candidate:
    assert candidate.path is not None  # one with a build has a file
    try:
        return replace(candidate, sha256=file_digest(candidate.path))
    except OSError as error:
        return replace(candidate, problem=f"{candidate.path} cannot be read ({error.strerror}): {mend_of(candidate.origin)}.")


def current_context(index: int | None = None) -> Context:
    """The present machine, with only card `index`, or with all its cards."""
    driver = open_driver()
    cards = list_cards(driver)
    checkout = _checkout()
    return Context(
        version=__version__,
        source=sources.source_digest(checkout) if checkout else None,
        ops=frozenset(torch.ops.albatross),
        platform=re.sub(r"[-.]", "_", sysconfig.get_platform()),
        python_abi=_python_abi(),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        driver_cuda=supported_cuda(driver),
        cards=cards if index is None else cards[index : index + 1],
        kernel_arch=os.environ.get(KERNEL_ARCH) or None,
    )


def _python_abi() -> str:
    suffix = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    kind = "cp" if sys.implementation.name == "cpython" else sys.implementation.name
    return f"{kind}{sys.version_info.major}{sys.version_info.minor}{suffix}"


def _checkout() -> Path | None:
    """The working copy that this package runs from, if it runs from one."""
    root = sources.source_root()
    return root if root is not None and sources.is_checkout(root) else None


def find_candidates(context: Context) -> tuple[Candidate, ...]:
    """The libraries to consider, in order: the file named by ALBATROSS_LIB and no other; or else a checkout's local build, the
    package's own library, and, if ALBATROSS_JIT is 1, one built for the cards of the context."""
    forced = os.environ.get(FORCED)
    return (_forced(Path(forced).expanduser().absolute()),) if forced else tuple(_installed(context))


def _forced(path: Path) -> Candidate:
    if not path.is_file():
        return Candidate(FORCED, problem=f"{FORCED} should name a library, but {path} is no file: {mend_of(FORCED)}.")
    return read_candidate(FORCED, path.parent, path.name)


def _installed(context: Context) -> Iterator[Candidate]:
    checkout = _checkout()
    if checkout is not None:
        folder = checkout / "build" / "local"
        absence = Candidate(LOCAL, problem=f"This checkout has no library in {folder}: {mend_of(LOCAL)}.")
        yield read_candidate(LOCAL, folder) if (folder / RECORD_FILE).exists() else absence
    yield read_candidate(PACKAGE, PACKAGE_FOLDER)
    if os.environ.get(WANTS_JIT) == "1":
        from albatross.ops import _jit  # the whole builder, which few need

        yield _jit.find_library(context)


@cache
def open_library(candidate: Candidate) -> NativeLibrary:
    """Open a library that was chosen, unless it is open. Raises NativeLibraryError if another one is, or if it does not fit."""
    path, build = candidate.path, candidate.build
    assert path is not None  # select chooses no candidate without a file
    assert build is not None
    if any(map(_has_kernel, torch.ops.albatross)):
        raise NativeLibraryError(
            f"{path} was not opened, because this process already holds the albatross ops of another library: start a new "
            f"process to change libraries, or set {FORCED} to one that has code for all cards."
        )
    try:
        if build.python_abi == "none":
            torch.ops.load_library(path)
        else:
            _import_library(path)
    except (OSError, ImportError) as error:
        raise NativeLibraryError(
            f"{path} (built with torch {build.torch_built_with}) does not open in torch {torch.__version__}: {error}. Reinstall "
            "albatross-rwkv, or build it from source beside this torch (albatross build)."
        ) from error
    missing = [op for op in build.ops if not _has_kernel(op)]
    if missing:
        raise NativeLibraryError(
            f"{path} opened, but of the ops in its record it does not hold {', '.join(missing)}: {mend_of(candidate.origin)}."
        )
    return NativeLibrary(LIBRARY_NAME, path, build)


def _import_library(path: Path) -> None:
    """Import a library that is a module of Python; its static initialisers register the ops."""
    loader = importlib.machinery.ExtensionFileLoader(LIBRARY_NAME, str(path))
    spec = importlib.util.spec_from_file_location(LIBRARY_NAME, path, loader=loader)
    assert spec is not None  # a location and a loader were given
    loader.exec_module(importlib.util.module_from_spec(spec))


def _has_kernel(op: str) -> bool:
    return op in torch.ops.albatross and bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"albatross::{op}", "CUDA"))
