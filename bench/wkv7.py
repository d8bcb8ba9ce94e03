"""Times the WKV-7 kernel over sequences on one CUDA card, as bytes a second beside what a plain copy reaches in the same run.

    python -m bench.wkv7 [--out FILE]

Each figure is the median of replays of one CUDA graph, so that it holds no launch overhead of Python's. The kernel of one token
a row is in `bench.tmix`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from albatross import ops
from bench.cuda import DEVICE, DTYPES, bytes_result, open_card, time_graph
from bench.timing import Result, make_parser, write_report

NUM_HEADS = 64  # of a 7.2B model
PREFILLS = ((1, 4096), (8, 512), (64, 64))  # (rows, tokens of each)


def make_vectors(num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """r, w, k, v, a, b in fp16, of the sizes at which a state stays bounded."""
    r, w, k, v, kk = (torch.randn(num_tokens, NUM_HEADS, 64, device=DEVICE) for _ in range(5))
    kk = torch.nn.functional.normalize(kk, dim=-1)
    return r.half(), w.half(), (0.3 * k).half(), v.half(), (-kk).half(), (0.5 * kk).half()


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bench_prefill(num_rows: int, length: int, dtype: torch.dtype, bandwidth: float, name: str) -> Result:
    pool = torch.zeros(num_rows, NUM_HEADS, 64, 64, dtype=dtype, device=DEVICE)
    vectors = make_vectors(num_rows * length)
    y = torch.empty_like(vectors[0])
    slots, cu_seqlens = int32(range(num_rows)), int32(range(0, num_rows * length + 1, length))
    measured = time_graph([lambda: ops.wkv7_prefill(pool, *vectors, cu_seqlens, slots, y)])
    return bytes_result(f"prefill {num_rows} x {length}, {name} state", measured, 2 * pool.nbytes + 7 * y.nbytes, bandwidth)


def main() -> None:
    args = make_parser(__doc__ or "").parse_args()
    bandwidth, results = open_card("bench.wkv7")
    for name, dtype in DTYPES.items():
        results += [bench_prefill(num_rows, length, dtype, bandwidth, name) for num_rows, length in PREFILLS]
    write_report(results, args.out)


if __name__ == "__main__":
    main()
