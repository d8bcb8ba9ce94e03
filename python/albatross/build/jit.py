"""Builds the native library on the machine that runs it, once for each set of sources, tools, torch and architectures.

A build is kept in the cache folder under a key of all that it depends on, so that it is found by whoever needs the same and
by nobody else. Nothing is built unless somebody asks: `albatross build --jit`, or the loader under ALBATROSS_JIT=1.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from albatross.build import resources
from albatross.build.lock import TIMEOUT_S, build_lock
from albatross.build.native import RECORD_FILE, Listener, Options, Record, compile_library, platform_name, writing
from albatross.build.sources import source_digest, source_root
from albatross.build.toolchain import BuildError, Toolchain, find_toolchain

_MEND = "name a folder that can be written in XDG_CACHE_HOME"


@dataclass(frozen=True, slots=True)
class Plan:
    """A library that could be built here, and `folder`, where it lies once it was."""

    root: Path
    toolchain: Toolchain
    options: Options
    folder: Path


def cache_folder() -> Path:
    """`albatross/jit` in the user's cache folder; nothing is created."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "albatross" / "jit"
    except RuntimeError as error:
        raise BuildError(f"This user has no home folder to keep a built library in: {_MEND}.") from error


def cache_key(source: str, toolkit: str, torch: str, archs: str, flags: str) -> str:
    """The name of the cache entry for these sources (their digest), versions, architectures and options."""
    return hashlib.sha256(json.dumps([source, toolkit, torch, archs, flags, platform_name()]).encode()).hexdigest()[:32]


def make_plan(options: Options) -> Plan:
    """What `options` come to on this machine. Builds nothing. Raises BuildError where something is missing for it."""
    root = source_root()
    if root is None:
        raise BuildError("This installation has no sources of the native library to build from: reinstall albatross-rwkv.")
    toolchain = find_toolchain(options.lane, options.glibc)
    flags = {name: value for name, value in asdict(options).items() if name not in ("archs", "jobs")}
    key = cache_key(source_digest(root), toolchain.toolkit, toolchain.torch_version, options.archs, json.dumps(flags))
    return Plan(root, toolchain, options, cache_folder() / key)


def find_cached(plan: Plan) -> Path | None:
    """The folder of the built library and its record; None if it was not built yet."""
    try:
        return plan.folder if (plan.folder / read_record(plan.folder)["library"]).is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # an entry that cannot be read is built again


def read_record(folder: Path) -> Record:
    """The record of a built library. Raises OSError or ValueError where there is none."""
    return dict(json.loads((folder / RECORD_FILE).read_bytes()))


def build_cached(plan: Plan, listener: Listener | None = None, *, timeout_s: float = TIMEOUT_S) -> Path:
    """The folder of the library, which is built if it is not there. Of several processes one builds, and the others wait.

    Raises BuildError.
    """
    return find_cached(plan) or _build(plan, listener or Listener(), timeout_s)


def _build(plan: Plan, listener: Listener, timeout_s: float) -> Path:
    parent, key = plan.folder.parent, plan.folder.name
    work = parent / f"{key}.{os.getpid()}.build"
    with writing(_MEND), build_lock(parent / f"{key}.lock", listener.message, timeout_s):
        found = find_cached(plan)
        if found is not None:
            return found
        for left in parent.glob(f"{key}.*.build"):
            shutil.rmtree(left, ignore_errors=True)  # of a build that was killed; a compiler of it may still run
        compile_library(plan.toolchain, plan.root, work / "cmake", work / "library", plan.options, listener)
        shutil.copyfile(work / "cmake" / resources.FILE, work / "library" / resources.FILE)
        shutil.rmtree(plan.folder, ignore_errors=True)
        (work / "library").rename(plan.folder)
        shutil.rmtree(work, ignore_errors=True)
        return plan.folder
