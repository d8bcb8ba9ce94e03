"""Times the WKV-7 kernels on one CUDA card, as bytes a second beside what a plain copy reaches in the same run.

    python -m bench.wkv7 [--out FILE]

Each figure is the median of replays of one CUDA graph, so that it holds no launch overhead of Python's. Every call works on
states of its own, since states that stay in the L2 cache would make the memory look faster than it is.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from albatross import ops
from albatross.errors import ConfigError
from bench.timing import Measured, Result, make_parser, summarise, write_report

NUM_HEADS = 64  # of a 7.2B model
DEVICE = "cuda"
WORKING_SET_BYTES = 1 << 30  # far beyond any L2 cache,
MAX_CALLS = 256  # unless that takes more calls than this: 128 MiB for one row of fp16, still more than an H200's 50 MiB
COPY_BYTES = 4 << 30
DECODE_ROWS = (1, 32, 256)
PREFILLS = ((1, 4096), (8, 512))  # (rows, tokens of each)
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def time_graph(calls: Sequence[Callable[[], object]], replays: int = 20) -> Measured:
    """Seconds of one call, from graphs that hold each of `calls` once."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    seconds = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return summarise(seconds)


def copy_bandwidth() -> float:
    """Bytes a second of the plainest kernel that reads and writes, both counted. A copy in a graph would not do: the copy
    engine that may run it is slower than the multiprocessors."""
    source = torch.randint(-(2**62), 2**62, (COPY_BYTES // 8,), device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / time_graph([lambda: torch.add(source, 1, out=target)]).median


def make_vectors(num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """r, w, k, v, a, b in fp16, of the sizes at which a state stays bounded."""
    r, w, k, v, kk = (torch.randn(num_tokens, NUM_HEADS, 64, device=DEVICE) for _ in range(5))
    kk = torch.nn.functional.normalize(kk, dim=-1)
    return r.half(), w.half(), (0.3 * k).half(), v.half(), (-kk).half(), (0.5 * kk).half()


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def result(name: str, measured: Measured, num_bytes: int, bandwidth: float) -> Result:
    details = {"us": measured.median * 1e6, "us_low": measured.low * 1e6, "us_high": measured.high * 1e6, "bytes": num_bytes}
    return Result(name, num_bytes / measured.median / 1e9, "GB/s", bandwidth / 1e9, details)


def bench_decode(num_rows: int, dtype: torch.dtype, bandwidth: float, name: str) -> Result:
    state_bytes = num_rows * NUM_HEADS * 64 * 64 * dtype.itemsize
    num_pools = max(1, min(MAX_CALLS, WORKING_SET_BYTES // state_bytes))
    pools = torch.zeros(num_rows, num_pools, NUM_HEADS, 64, 64, dtype=dtype, device=DEVICE)
    vectors = make_vectors(num_rows)
    y = torch.empty_like(vectors[0])
    slots = int32(torch.randperm(num_rows).tolist())
    calls = [lambda i=i: ops.wkv7_decode(pools[:, i], *vectors, slots, y) for i in range(num_pools)]
    return result(f"decode {num_rows} rows, {name} state", time_graph(calls), 2 * state_bytes + 7 * y.nbytes, bandwidth)


def bench_prefill(num_rows: int, length: int, dtype: torch.dtype, bandwidth: float, name: str) -> Result:
    pool = torch.zeros(num_rows, NUM_HEADS, 64, 64, dtype=dtype, device=DEVICE)
    vectors = make_vectors(num_rows * length)
    y = torch.empty_like(vectors[0])
    slots, cu_seqlens = int32(range(num_rows)), int32(range(0, num_rows * length + 1, length))
    measured = time_graph([lambda: ops.wkv7_prefill(pool, *vectors, cu_seqlens, slots, y)])
    return result(f"prefill {num_rows} x {length}, {name} state", measured, 2 * pool.nbytes + 7 * y.nbytes, bandwidth)


def main() -> None:
    args = make_parser(__doc__ or "").parse_args()
    if not torch.cuda.is_available():
        raise ConfigError("bench.wkv7 needs a CUDA card and a CUDA build of torch; see albatross doctor.")
    ops.load_native(DEVICE)
    bandwidth = statistics.median(copy_bandwidth() for _ in range(3))
    results = [Result("copy", bandwidth / 1e9, "GB/s")]
    for name, dtype in DTYPES.items():
        results += [bench_decode(num_rows, dtype, bandwidth, name) for num_rows in DECODE_ROWS]
        results += [bench_prefill(num_rows, length, dtype, bandwidth, name) for num_rows, length in PREFILLS]
    write_report(results, args.out)


if __name__ == "__main__":
    main()
