"""What each kernel of a step takes, from CUPTI's records of replayed graphs, and what its family moves or computes a second.

Knows kernels by their names only. Kernels that overlap are each counted whole, so that their sum may exceed the step.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from bench.timing import Result

STEPS = 10
# Which part of a step a kernel belongs to, by what its name says; the first that fits.
FAMILIES = (
    ("recurrence", re.compile(r"wkv|tmix_(decode|prefill|summary)")),
    ("draw", re.compile(r"sampl|draw|penal|argmax|softmax|(?<!search)sort|scan|topk", re.IGNORECASE)),
    ("norm and mix", re.compile(r"norm|mix|readout|prepare|relu", re.IGNORECASE)),
    ("products", re.compile(r"gemm|gemv|linear|splitK|cutlass|nvjet|cublas", re.IGNORECASE)),
    ("moves", re.compile(r"mem(cpy|set)|copy|index|gather|fill|elementwise|searchsorted", re.IGNORECASE)),
)


SCALES = {"GB/s": 1e9, "TFLOP/s": 1e12}
AMOUNTS = {"GB/s": "bytes", "TFLOP/s": "flops"}  # how details name what is counted


class Work(NamedTuple):
    """What a family of kernels does in a step, in bytes or floating-point operations, and what the card can do a second."""

    amount: int
    rate: float
    unit: Literal["GB/s", "TFLOP/s"]


class Kernel(NamedTuple):
    """All calls of one kernel in one step."""

    name: str
    calls: float
    us: float

    @property
    def family(self) -> str:
        return next((family for family, pattern in FAMILIES if pattern.search(self.name)), "other")


def profile_steps(title: str, step: Callable[[], object], known: Mapping[str, Work]) -> list[Result]:
    """Results for every kernel (us a step) and every family: where `known` says what one does, its rate beside the card's."""
    kernels = record(step)
    total = sum(kernel.us for kernel in kernels)
    results = [
        Result(
            f"{title}: {kernel.name}", kernel.us, "us",
            details={"kernel": kernel.name, "family": kernel.family, "calls": kernel.calls, "share": kernel.us / total},
        )
        for kernel in kernels
    ]  # fmt: skip
    for family, us in sum_by_family(kernels).items():
        details = {"family": family, "us": us, "share": us / total}
        work = known.get(family)
        if work is None:
            results.append(Result(f"{title}: all {family}", us, "us", details=details))
            continue
        scale = SCALES[work.unit]
        details[AMOUNTS[work.unit]] = work.amount
        results.append(Result(f"{title}: all {family}", work.amount / us * 1e6 / scale, work.unit, work.rate / scale, details))
    return results


def record(step: Callable[[], object]) -> list[Kernel]:
    """The kernels of one step, the longest first; averages over STEPS."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    events = session.events() or ()
    return group((event.name, event.time_range.elapsed_us()) for event in events if event.device_type.name == "CUDA")


def group(events: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Sums (name, us) of STEPS steps by short name, the longest first."""
    calls: defaultdict[str, int] = defaultdict(int)
    times: defaultdict[str, float] = defaultdict(float)
    for name, us in events:
        calls[short_name(name)] += 1
        times[short_name(name)] += us
    kernels = [Kernel(name, calls[name] / STEPS, us / STEPS) for name, us in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def sum_by_family(kernels: Iterable[Kernel]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[kernel.family] += kernel.us
    return dict(sums)


def short_name(name: str) -> str:
    """A C++ signature without result, template arguments, namespaces and parameters."""
    text = name.removeprefix("void ").replace("(anonymous namespace)", "")
    without = ""
    depth = 0
    for char in text:
        depth += char == "<"
        if not depth:
            without += char
        depth -= char == ">" and depth > 0
    return without.partition("(")[0].strip().rpartition("::")[2] or name
