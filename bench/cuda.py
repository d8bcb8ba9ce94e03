"""What benchmarks on one CUDA card share: timing by events, and what the card can do at most, measured in the same run.

Knows nothing of models. All figures are medians of replays of one CUDA graph, so that they hold no launch overhead of Python's.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch

from albatross import ops
from albatross.errors import ConfigError
from bench.timing import Measured, Result, summarise

DEVICE = "cuda"
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}  # of states
COPY_BYTES = 4 << 30
GEMM_SIZE = 8192  # of square matrices: large enough for the full rate of any card


def need_cuda(program: str) -> None:
    """Raises ConfigError where there is no card to measure."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{program} needs a CUDA card and a CUDA build of torch; see albatross doctor.")


def open_card(program: str) -> tuple[float, list[Result]]:
    """Opens the native library. Returns the bandwidth of a copy, in bytes a second, and the list of results that begins with it.

    Raises ConfigError or NativeLibraryError where kernels cannot be measured.
    """
    need_cuda(program)
    ops.load_native(DEVICE)
    bandwidth = statistics.median(copy_bandwidth() for _ in range(3))
    return bandwidth, [Result("copy", bandwidth / 1e9, "GB/s")]


def bytes_result(name: str, measured: Measured, num_bytes: int, bandwidth: float) -> Result:
    """What a kernel that moves so many bytes a call reaches, beside what a copy does."""
    details = {"us": measured.median * 1e6, "us_low": measured.low * 1e6, "us_high": measured.high * 1e6, "bytes": num_bytes}
    return Result(name, num_bytes / measured.median / 1e9, "GB/s", bandwidth / 1e9, details)


def time_graph(calls: Sequence[Callable[[], object]], replays: int = 20) -> Measured:
    """Seconds of one call, from a graph that holds each of `calls` once."""
    seconds = time_each(capture(calls).replay, replays)
    return summarise([value / len(calls) for value in seconds])


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of `calls`, one after another, which have run once before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_each(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of the device between the begin and the end of each call, after one that is not counted. The host runs ahead,
    so that it does not show as long as it is quicker than the device."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    call()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(marks)]


def copy_bandwidth() -> float:
    """Bytes a second of the plainest kernel that reads and writes, both counted. A copy in a graph would not do: the copy
    engine that may run it is slower than the multiprocessors."""
    source = torch.randint(-(2**62), 2**62, (COPY_BYTES // 8,), device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / time_graph([lambda: torch.add(source, 1, out=target)]).median


def gemm_rate() -> float:
    """Floating-point operations a second of the library's product of two large fp16 matrices of random numbers."""
    x, weight = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=DEVICE, dtype=torch.float16) for _ in range(2))
    out = torch.empty_like(x)
    return 2 * GEMM_SIZE**3 / time_graph([lambda: torch.mm(x, weight.t(), out=out)]).median
