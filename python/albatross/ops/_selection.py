"""Decides which native library fits a machine, from what was read of both. Pure: opens, reads and asks nothing.

Every rejection is one sentence: what was expected, what was found, what to do. `_manifest` reads the candidates, `_loader`
asks the machine and obeys.
"""

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from albatross.errors import NativeLibraryError, UnsupportedGPUError
from albatross.ops._driver import Card
from albatross.ops._manifest import FORCED, LIBRARY_NAME, PACKAGE, Build, Candidate, mend_of
from albatross.ops._targets import code_for, forced_target, runs_on

KERNEL_ARCH = "ALBATROSS_KERNEL_ARCH"  # environment variable: the only code that may run, as sm_90, 90, 9.0 or compute_80
OLDEST_CAPABILITY = (8, 0)  # the kernels use cp.async and the m16n8k16 product, which came with it
_PLAIN_TORCH = "ask for plain torch (--backend reference)"


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that the choice depends on besides the candidates."""

    version: str  # of this package
    source: str | None  # digest of the sources of the checkout that the package runs from; None: it runs from none
    ops: frozenset[str]  # that this package registers
    platform: str  # as in "linux_x86_64"
    python_abi: str  # as in "cp312"
    torch_version: str
    torch_cuda: str | None  # CUDA version torch was built with
    torch_hip: str | None  # ROCm version torch was built with
    driver_cuda: tuple[int, int] | None  # newest CUDA the driver can run; None without a driver
    cards: tuple[Card, ...]  # the cards that are to be used
    kernel_arch: str | None = None  # as the user gave it


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate's fate; `rejection` is None for the one that was chosen."""

    candidate: Candidate
    rejection: str | None = None
    error: type[NativeLibraryError] = NativeLibraryError

    def __str__(self) -> str:
        return f"{self.candidate.origin}: {self.rejection or 'chosen'}"


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of `select`: a verdict for each candidate, in the order they were considered."""

    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Candidate | None:
        return next((verdict.candidate for verdict in self.verdicts if verdict.rejection is None), None)

    @property
    def passed_over(self) -> tuple[Verdict, ...]:
        """The libraries that exist and would come before the chosen one, had they fitted; none where nothing was chosen."""
        rejected = tuple(itertools.takewhile(lambda verdict: verdict.rejection is not None, self.verdicts))
        return tuple(verdict for verdict in rejected if verdict.candidate.build) if self.chosen else ()

    def error(self) -> NativeLibraryError:
        """The exception to raise where nothing was chosen; its text holds every rejection, with its origin if several differ.

        UnsupportedGPUError if the cards or the driver are all that stands against the libraries that exist.
        """
        verdicts = {verdict.rejection: verdict for verdict in self.verdicts}.values()
        text = " ".join(str(verdict) if len(verdicts) > 1 else str(verdict.rejection) for verdict in verdicts)
        kinds = {verdict.error for verdict in self.verdicts if verdict.candidate.build}
        return (kinds.pop() if len(kinds) == 1 else NativeLibraryError)(text)


def select(context: Context, candidates: Iterable[Candidate]) -> Decision:
    """Judge the candidates in order and choose the first that fits. A digest that was not taken is not judged."""
    verdicts: list[Verdict] = []
    is_chosen = False
    for candidate in candidates:
        verdict = Verdict(candidate, "Not needed: a candidate before it fits.") if is_chosen else _judge(context, candidate)
        is_chosen = is_chosen or verdict.rejection is None
        verdicts.append(verdict)
    return Decision(tuple(verdicts))


def _judge(context: Context, candidate: Candidate) -> Verdict:
    if candidate.problem is not None:
        return Verdict(candidate, candidate.problem)
    for machine_rule, error in _MACHINE_RULES:
        rejection = machine_rule(context)
        if rejection is not None:
            return Verdict(candidate, rejection, error)
    if candidate.build is None:  # what is still to be built is built for this machine
        return Verdict(candidate)
    for rule, error in _LIBRARY_RULES:
        rejection = rule(context, candidate, candidate.build)
        if rejection is not None:
            return Verdict(candidate, rejection, error)
    return Verdict(candidate)


def _torch_kind(context: Context) -> str | None:
    if context.torch_cuda is not None:
        return None
    if context.torch_hip is not None:
        return (
            f"The library needs a CUDA build of torch, but torch {context.torch_version} was built for ROCm {context.torch_hip}, "
            f"for which there is no library: {_PLAIN_TORCH}."
        )
    return (
        f"The library needs a CUDA build of torch, but torch {context.torch_version} was built without CUDA: "
        "install a CUDA build of torch, or use the CPU (--device cpu)."
    )


def _has_driver(context: Context) -> str | None:
    if context.driver_cuda is not None:
        return None
    return "The library needs an NVIDIA driver, but none was found: install the newest one, or use the CPU (--device cpu)."


def _has_cards(context: Context) -> str | None:
    if not context.cards:
        return "A card was asked for that is not visible to the NVIDIA driver: see nvidia-smi and CUDA_VISIBLE_DEVICES."
    for card in context.cards:
        if card.capability < OLDEST_CAPABILITY:
            return (
                f"The kernels need compute capability {_dotted(OLDEST_CAPABILITY)} or later, but {card} has "
                f"{_dotted(card.capability)}: use another card, or {_PLAIN_TORCH}."
            )
    return None


def _forced_arch(context: Context) -> str | None:
    if context.kernel_arch is None:
        return None
    target = forced_target(context.kernel_arch)
    if target is None:
        return (
            f"{KERNEL_ARCH} must look like sm_90, 90, 9.0 or compute_90, but is {context.kernel_arch!r}: name one of the "
            "architectures that albatross doctor shows, or unset it."
        )
    for card in context.cards:
        if not runs_on(target, card.capability):
            return f"{KERNEL_ARCH} asks for {target}, but {card} cannot run it: name {card.sm}, or unset {KERNEL_ARCH}."
    return None


def _name(context: Context, candidate: Candidate, build: Build) -> str | None:
    if build.name == LIBRARY_NAME:
        return None
    return f"The library should be {LIBRARY_NAME}, but its record is of {build.name}: {mend_of(candidate.origin)}."


def _package_version(context: Context, candidate: Candidate, build: Build) -> str | None:
    """The others are held to their sources, or were named by somebody who may know that they fit."""
    if build.version == context.version or candidate.origin != PACKAGE:
        return None
    return f"The library is of albatross {build.version}, but this is albatross {context.version}: {mend_of(candidate.origin)}."


def _source(context: Context, candidate: Candidate, build: Build) -> str | None:
    if context.source in (None, build.source) or candidate.origin == FORCED:
        return None
    return (
        f"The library is stale, built from sources {build.source[:8]}, but those of this checkout are "
        f"{context.source[:8]}: run albatross build."
    )


def _ops(context: Context, candidate: Candidate, build: Build) -> str | None:
    missing = sorted(context.ops - set(build.ops))
    if not missing:
        return None
    return f"The library should hold all ops of this albatross, but lacks {', '.join(missing)}: {mend_of(candidate.origin)}."


def _platform(context: Context, candidate: Candidate, build: Build) -> str | None:
    if build.platform == context.platform:
        return None
    return f"The library was built for {build.platform}, but this is {context.platform}: install the wheel for this platform."


def _torch_version(context: Context, candidate: Candidate, build: Build) -> str | None:
    found = _version(context.torch_version)
    if found < _version(build.torch_min):
        wanted = f"{build.torch_min} or later"
    elif build.torch_max is not None and found > _version(build.torch_max):
        wanted = f"{build.torch_max} at most"
    else:
        return None
    mend = f"run pip install 'torch>={build.torch_min}'"
    if build.torch_max is not None:
        mend = f"install the wheel for this torch, or run pip install 'torch=={build.torch_max}.*'"
    return (
        f"The library needs torch {wanted} (it was built with {build.torch_built_with}), but torch is "
        f"{context.torch_version}: {mend}."
    )


def _torch_cuda(context: Context, candidate: Candidate, build: Build) -> str | None:
    """A library of the stable ABI speaks to torch in C and to the driver through its own runtime, so it needs no equal CUDA."""
    toolkit, found = _major(build.cuda_toolkit), _major(context.torch_cuda or "0")
    if build.torch_abi == "stable" or toolkit == found:
        return None
    return (
        f"The library needs a torch built with CUDA {toolkit}, but torch {context.torch_version} was built with CUDA "
        f"{context.torch_cuda}: install the wheel for CUDA {found}, or a torch for CUDA {toolkit}."
    )


def _python_abi(context: Context, candidate: Candidate, build: Build) -> str | None:
    if build.python_abi in ("none", context.python_abi):
        return None
    return (
        f"The library was built for Python {build.python_abi}, but this is {context.python_abi}: install the wheel for this "
        "Python, or the one of the stable ABI."
    )


def _driver(context: Context, candidate: Candidate, build: Build) -> str | None:
    toolkit = _major(build.cuda_toolkit)
    if context.driver_cuda is None or context.driver_cuda >= (toolkit, 0):
        return None
    return (
        f"The library needs CUDA {toolkit}.0, that is driver {build.driver_min} or newer, but the NVIDIA driver here supports "
        f"CUDA {_dotted(context.driver_cuda)} at most: update the driver."
    )


def _cards(context: Context, candidate: Candidate, build: Build) -> str | None:
    for card in context.cards:
        target = code_for(card.capability, build)
        if target is None:
            return (
                f"The library holds code for {build.targets}, but {card} can run none of it: use another card, run albatross "
                f"build --arch {_dotted(card.capability)} where there is an nvcc, or {_PLAIN_TORCH}."
            )
        # A driver runs the machine code of every toolkit of its major version, but compiles no PTX of a later toolkit.
        if target.startswith("compute") and (context.driver_cuda or (0, 0)) < _version(build.cuda_toolkit):
            return (
                f"The library holds only PTX of CUDA {_dotted(_version(build.cuda_toolkit))} for {card}, which the NVIDIA driver "
                f"here, for CUDA {_dotted(context.driver_cuda or (0, 0))} at most, cannot compile: update the driver."
            )
    return None


def _forced_code(context: Context, candidate: Candidate, build: Build) -> str | None:
    """The forced code must be what the driver will take, since nothing can make it take another."""
    target = forced_target(context.kernel_arch) if context.kernel_arch else None
    if target is None:
        return None
    if target not in build.arch + build.ptx:
        return f"{KERNEL_ARCH} asks for {target}, but the library holds {build.targets}: name one of them, or build one with it."
    for card in context.cards:
        taken = code_for(card.capability, build)
        if taken != target:
            return (
                f"{KERNEL_ARCH} asks for {target}, but the driver takes {taken} of this library for {card}: build one that "
                f"holds {target} alone (albatross build)."
            )
    return None


def _file(context: Context, candidate: Candidate, build: Build) -> str | None:
    if candidate.sha256 in (None, build.sha256):
        return None
    return (
        f"{candidate.path} is not the file that was built (its SHA-256 should begin with {build.sha256[:8]}, but begins with "
        f"{candidate.sha256[:8]}): {mend_of(candidate.origin)}."
    )


_MACHINE_RULES: tuple[tuple[Callable[[Context], str | None], type[NativeLibraryError]], ...] = (
    (_torch_kind, NativeLibraryError),
    (_has_driver, UnsupportedGPUError),
    (_has_cards, UnsupportedGPUError),
    (_forced_arch, NativeLibraryError),
)
_LIBRARY_RULES: tuple[tuple[Callable[[Context, Candidate, Build], str | None], type[NativeLibraryError]], ...] = (
    (_name, NativeLibraryError),
    (_package_version, NativeLibraryError),
    (_source, NativeLibraryError),
    (_ops, NativeLibraryError),
    (_platform, NativeLibraryError),
    (_torch_version, NativeLibraryError),
    (_torch_cuda, NativeLibraryError),
    (_python_abi, NativeLibraryError),
    (_driver, UnsupportedGPUError),
    (_cards, UnsupportedGPUError),
    (_forced_code, NativeLibraryError),
    (_file, NativeLibraryError),
)


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
