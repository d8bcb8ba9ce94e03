"""Chooses the native library, says why, and opens it once.

`find_candidates` reads files, `current_context` asks the machine, `select` decides from those two alone, before anything is
opened; `load_native` does all three and opens the choice. Every rejection is kept as one sentence that names the mend. There
is no silent fallback: without a usable library a CUDA engine does not start, and the reference runs only if asked for by name.
"""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from albatross.errors import NativeLibraryError, UnsupportedGPUError
from albatross.ops._driver import Card, list_cards, open_driver, supported_cuda

LIBRARY_NAME = "rwkv7_state_fwd_fp16"
BUILD_FILE = "_build.json"
BUILD_SCHEMA = 1  # version of BUILD_FILE's layout; setup.py writes it
FORCED_LIBRARY = "ALBATROSS_LIB"  # environment variable naming a library file; it is used or refused, nothing else is tried
_PACKAGE_FOLDER = Path(__file__).parents[1] / "_native"
_OP = "albatross::wkv7_prefill"


@dataclass(frozen=True, slots=True)
class Build:
    """What one built library says of itself, from the `_build.json` beside it. Times and paths of the build are not in it."""

    version: str
    sha256: str
    torch_min: str
    torch_built_with: str
    cuda_toolkit: str
    driver_min: str
    platform: str
    arch: tuple[str, ...]  # ("sm_80", ...): machine code
    ptx: tuple[str, ...]  # ("compute_120",): code the driver compiles for later cards

    @property
    def targets(self) -> str:
        return ", ".join([*self.arch, *(f"PTX {name}" for name in self.ptx)])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A library that might be used. `build` is None where there is none to consider, for the reason in `problem`."""

    origin: str
    path: Path | None = None
    build: Build | None = None
    sha256: str | None = None  # of the file as it is
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """Everything about the machine that the choice depends on."""

    torch_version: str
    torch_cuda: str | None  # CUDA version torch was built with; None for a CPU or ROCm build
    driver_cuda: tuple[int, int] | None  # newest CUDA the driver can run; None without a driver
    cards: tuple[Card, ...]  # the cards that are to be used
    platform: str  # as in "linux_x86_64"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate's fate; `rejection` is None for the one that was chosen."""

    candidate: Candidate
    rejection: str | None = None
    error: type[NativeLibraryError] = NativeLibraryError


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of `select`: a verdict for each candidate, in the order they were considered."""

    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Candidate | None:
        return next((verdict.candidate for verdict in self.verdicts if verdict.rejection is None), None)

    def error(self) -> NativeLibraryError:
        """The exception to raise where nothing was chosen; its text holds every rejection."""
        text = " ".join(f"{verdict.rejection}" for verdict in self.verdicts)
        kinds = {verdict.error for verdict in self.verdicts}
        return (kinds.pop() if len(kinds) == 1 else NativeLibraryError)(text)


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
    decision = select(current_context(index), find_candidates())
    if decision.chosen is None:
        raise decision.error()
    return _open(decision.chosen)


@cache
def _open(candidate: Candidate) -> NativeLibrary:
    assert candidate.path is not None  # select chooses no candidate without a file
    assert candidate.build is not None
    if _has_cuda_ops():
        raise NativeLibraryError(
            f"{candidate.path} was not opened, because this process already holds the albatross ops of another library: "
            "start a new process to change libraries."
        )
    try:
        torch.ops.load_library(candidate.path)
    except OSError as error:
        raise NativeLibraryError(
            f"{candidate.path} (built with torch {candidate.build.torch_built_with}) does not open in torch "
            f"{torch.__version__}: {error}. Reinstall albatross-rwkv, or build it from source beside this torch."
        ) from error
    if not _has_cuda_ops():
        raise NativeLibraryError(f"{candidate.path} opened, but holds no albatross ops: reinstall albatross-rwkv.")
    return NativeLibrary(LIBRARY_NAME, candidate.path, candidate.build)


def _has_cuda_ops() -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(_OP, "CUDA"))


def current_context(index: int | None = None) -> Context:
    """The present machine, with only card `index`, or with all its cards."""
    driver = open_driver()
    cards = list_cards(driver)
    return Context(
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        driver_cuda=supported_cuda(driver),
        cards=cards if index is None else cards[index : index + 1],
        platform=re.sub(r"[-.]", "_", sysconfig.get_platform()),
    )


def find_candidates() -> tuple[Candidate, ...]:
    """The libraries to consider, in order: the file named by ALBATROSS_LIB and no other, else the package's own."""
    forced = os.environ.get(FORCED_LIBRARY)
    if forced:
        path = Path(forced).expanduser()
        return (_read_candidate(FORCED_LIBRARY, path.parent, path.name),)
    return (_read_candidate("package", _PACKAGE_FOLDER),)


def _read_candidate(origin: str, folder: Path, file_name: str | None = None) -> Candidate:
    """The library that `folder`'s build file describes; `file_name` overrides the file's name given there."""
    record = folder / BUILD_FILE
    try:
        content = json.loads(record.read_bytes())
        if content["schema"] != BUILD_SCHEMA:
            wanted, found = BUILD_SCHEMA, content["schema"]
            return Candidate(origin, problem=f"{record} has layout {found!r}, but this version reads {wanted}: reinstall.")
        if content["library"] is None:
            mend = "install a wheel that has it, or install torch and nvcc and then albatross-rwkv from source"
            return Candidate(origin, problem=f"This installation has no native library, because {content['why']}: {mend}.")
        path = folder / (file_name or content["library"])
        return Candidate(origin, path, _parse_build(content), hashlib.sha256(path.read_bytes()).hexdigest())
    except FileNotFoundError as error:
        return Candidate(origin, problem=f"{error.filename} does not exist: install albatross-rwkv, or build it from source.")
    except OSError as error:
        return Candidate(origin, problem=f"{error.filename} cannot be read: {error.strerror}.")
    except (ValueError, KeyError, TypeError) as error:
        return Candidate(origin, problem=f"{record} is not a valid build file ({error!r}): reinstall albatross-rwkv.")


def _parse_build(content: dict[str, Any]) -> Build:
    return Build(
        version=content["version"],
        sha256=content["sha256"],
        torch_min=content["torch"]["min"],
        torch_built_with=content["torch"]["built_with"],
        cuda_toolkit=content["cuda"]["toolkit"],
        driver_min=content["cuda"]["driver_min"],
        platform=content["platform"],
        arch=tuple(content["arch"]),
        ptx=tuple(content["ptx"]),
    )


def select(context: Context, candidates: Iterable[Candidate]) -> Decision:
    """Judge the candidates in order and choose the first that fits. Pure: opens, reads and asks nothing."""
    verdicts: list[Verdict] = []
    is_chosen = False
    for candidate in candidates:
        verdict = Verdict(candidate, "Not needed: a candidate before it fits.") if is_chosen else _judge(context, candidate)
        is_chosen = is_chosen or verdict.rejection is None
        verdicts.append(verdict)
    return Decision(tuple(verdicts))


def _judge(context: Context, candidate: Candidate) -> Verdict:
    if candidate.build is None:
        return Verdict(candidate, candidate.problem)
    if candidate.sha256 != candidate.build.sha256:
        text = f"{candidate.path} is not the file that was built (its SHA-256 differs): reinstall albatross-rwkv."
        return Verdict(candidate, text)
    for rule, error in _RULES:
        rejection = rule(context, candidate.build)
        if rejection is not None:
            return Verdict(candidate, rejection, error)
    return Verdict(candidate)


def _platform(context: Context, build: Build) -> str | None:
    if build.platform == context.platform:
        return None
    return f"The library was built for {build.platform}, but this is {context.platform}: install the wheel for this platform."


def _torch_version(context: Context, build: Build) -> str | None:
    if _version(context.torch_version) >= _version(build.torch_min):
        return None
    return (
        f"The library needs torch {build.torch_min} or later (it was built with {build.torch_built_with}), but torch is "
        f"{context.torch_version}: run pip install 'torch>={build.torch_min}'."
    )


def _torch_cuda(context: Context, build: Build) -> str | None:
    if context.torch_cuda is not None:
        return None
    return (
        f"The library needs a CUDA build of torch, but torch {context.torch_version} was built without CUDA: "
        "install a CUDA build of torch, or use the CPU (--device cpu)."
    )


def _driver(context: Context, build: Build) -> str | None:
    toolkit = build.cuda_toolkit.split(".")[0]
    if context.driver_cuda is None:
        return f"No NVIDIA driver was found: install driver {build.driver_min} or newer, or use the CPU (--device cpu)."
    if context.driver_cuda >= (int(toolkit), 0):
        return None
    found = "{}.{}".format(*context.driver_cuda)
    return (
        f"The library needs CUDA {toolkit}.0, that is driver {build.driver_min} or newer, but the NVIDIA driver here supports "
        f"CUDA {found} at most: update the driver."
    )


def _cards(context: Context, build: Build) -> str | None:
    if not context.cards:
        return "The card asked for is not visible to the NVIDIA driver: see nvidia-smi and CUDA_VISIBLE_DEVICES."
    for card in context.cards:
        if not is_covered(card.capability, build):
            return (
                f"GPU {card.index} ({card.name}, {card.sm}) is none of those the library was built for ({build.targets}): "
                f"use another card, build from source with TORCH_CUDA_ARCH_LIST={card.capability[0]}.{card.capability[1]}, "
                "or ask for plain torch (--backend reference)."
            )
    return None


_RULES: tuple[tuple[Callable[[Context, Build], str | None], type[NativeLibraryError]], ...] = (
    (_platform, NativeLibraryError),
    (_torch_version, NativeLibraryError),
    (_torch_cuda, NativeLibraryError),
    (_driver, UnsupportedGPUError),
    (_cards, UnsupportedGPUError),
)


def is_covered(capability: tuple[int, int], build: Build) -> bool:
    """Machine code runs on its own major version from its minor upwards, PTX on every capability from its own upwards.

    Code for one architecture alone (sm_90a, compute_90a) runs on that one alone; a family's (sm_100f) on its major version.
    """
    codes = [(*_capability(name), True) for name in build.arch] + [(*_capability(name), False) for name in build.ptx]
    for wanted, suffix, is_machine_code in codes:
        if suffix == "a":
            fits = capability == wanted
        elif suffix == "f" or is_machine_code:
            fits = capability[0] == wanted[0] and capability >= wanted
        else:
            fits = capability >= wanted
        if fits:
            return True
    return False


def _capability(name: str) -> tuple[tuple[int, int], str]:
    """((12, 0), "") of "sm_120" and "compute_120", ((9, 0), "a") of "sm_90a"."""
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)([af]?)", name)
    if found is None:
        raise ValueError(f"{name!r} is no architecture")
    return (int(found[1]), int(found[2])), found[3]


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)
