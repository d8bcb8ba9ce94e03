"""Times the matrix products of a decode step, kernel by kernel, as bytes a second beside what a plain copy reaches.

    python -m bench.linear [--model 7.2b] [--rows 1 8 32] [--out FILE]

Each call has weights of its own, so that they come from memory and not from the L2 cache; "cublas" is torch's choice for
the same products, one after another. The bound is the copy's speed: a product of few rows can at best read its weights that fast.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from albatross.models.synth import SIZES
from albatross.ops.linear import ROWS_LIMIT, grouped_linear, sparse_linear
from bench.cuda import DEVICE, bytes_result, open_card, time_graph
from bench.timing import Result, make_parser, write_report

WORKING_SET_BYTES = 1 << 30
MAX_CALLS = 64
SCALE = 64.0  # of the value matrix, as in the model
ACTIVE = 0.12  # of a squared ReLU's outputs are not zero in a trained model


class Role(NamedTuple):
    """The products of one launch as (N, K)."""

    name: str
    products: tuple[tuple[int, int], ...]


def roles(model: str) -> list[Role]:
    size = SIZES[model]
    c, f, ranks = size.hidden_size, size.hidden_size * 4, (size.w_rank, size.a_rank, size.v_rank, size.g_rank)
    return [
        Role("r k v and lora", ((c, c),) * 3 + tuple((rank, c) for rank in ranks)),
        Role("lora up", tuple((c, rank) for rank in ranks)),
        Role("output", ((c, c),)),
        Role("key", ((f, c),)),
        Role("value", ((c, f),)),
        Role("head", ((65536, c),)),
    ]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float16)


def value_calls(n: int, k: int, rows: int, number: int, kernel: str) -> list[Callable[[], object]]:
    x = randn(rows, k).square() * (torch.rand(rows, k, device=DEVICE) < ACTIVE)
    weights, out = [randn(k, n) for _ in range(number)], randn(rows, n)
    if kernel == "cublas":
        return [partial(torch.addmm, out, x, weight, beta=0, alpha=SCALE, out=out) for weight in weights]
    return [partial(sparse_linear, x, weight, SCALE, out) for weight in weights]


def group_calls(role: Role, rows: int, number: int, kernel: str) -> list[Callable[[], object]]:
    dtype = torch.float32 if role.name == "head" else torch.float16
    xs = [randn(rows, k) for _, k in role.products]
    outs = [torch.empty(rows, n, device=DEVICE, dtype=dtype) for n, _ in role.products]
    names = ["squared_relu" if role.name == "key" else "none"] * len(xs)
    sets = [[randn(n, k) for n, k in role.products] for _ in range(number)]
    if kernel != "cublas":
        return [partial(grouped_linear, xs, weights, names, outs) for weights in sets]
    return [partial(_multiply_by_cublas, xs, weights, outs) for weights in sets]


def _multiply_by_cublas(xs: list[Tensor], weights: list[Tensor], outs: list[Tensor]) -> None:
    for x, weight, out in zip(xs, weights, outs, strict=True):
        if out.dtype == x.dtype:
            torch.mm(x, weight.T, out=out)
        else:
            torch.mm(x, weight.T, out_dtype=out.dtype, out=out)


def kernels(rows: int) -> list[str]:
    return ["ours", "cublas"] if rows <= ROWS_LIMIT else ["cublas"]


def measure(model: str, rows: int, bandwidth: float) -> list[Result]:
    results = []
    for role in roles(model):
        weight_bytes = sum(2 * n * k for n, k in role.products)
        num_bytes = weight_bytes + sum(rows * (2 * k + 2 * n) for n, k in role.products)
        number = max(2, min(MAX_CALLS, WORKING_SET_BYTES // weight_bytes))
        for kernel in kernels(rows):
            n, k = role.products[0]
            calls = value_calls(n, k, rows, number, kernel) if role.name == "value" else group_calls(role, rows, number, kernel)
            seconds = time_graph(calls)
            result = bytes_result(f"{model}, {rows} rows: {role.name}, {kernel}", seconds, num_bytes, bandwidth)
            result.details["tflops"] = rows * weight_bytes / seconds.median / 1e12  # two operations a weight of two bytes
            results.append(result)
            del calls
    return results


def main() -> None:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", default=["7.2b"], choices=list(SIZES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    args = parser.parse_args()
    bandwidth, results = open_card("bench.linear")
    for model in args.model:
        for rows in args.rows:
            results += measure(model, rows, bandwidth)
    write_report(results, args.out)


if __name__ == "__main__":
    main()
