"""Registry entries and typed wrappers of the matrix products for few rows: schema, argument checks, fake and CPU implementation.

Knows shapes, nothing of layers; `models/linear.py` decides which product is computed here and which by cuBLAS.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from albatross.ops._checks import describe
from albatross.ops._registry import need_library, register
from albatross.reference import linear as reference
from albatross.reference.linear import ACTIVATIONS

MAX_PRODUCTS = 32  # of one call
ROWS_LIMIT = 8  # most rows of both ops
_COUNTERS = 1 << 16  # numbers at the head of a workspace, as in csrc/linear.cpp
_PARTIAL_SUMS = 4 << 20  # float32: 16 MiB, enough for outputs of 500,000 and for 16 blocks on each output of the value matrix

@cache
def workspace(device: torch.device) -> Tensor:
    """Counters and partial sums that the calls on one device share; they run one after another, on one stream."""
    return torch.zeros(_COUNTERS + _PARTIAL_SUMS, dtype=torch.int32, device=device)


def grouped_linear(x: Sequence[Tensor], weight: Sequence[Tensor], activation: Sequence[str], out: Sequence[Tensor]) -> None:
    """out[i] = activation[i](x[i] @ weight[i]^T) for up to 32 products that do not depend on each other, in one launch.

    x: [T, K] fp16, T at most 8; weight: [N, K] fp16; out: [T, N] fp16 or fp32, mutated. K is a multiple of 8,
    rows may lie any multiple of 8 numbers apart. activation: see ACTIVATIONS. Sums are in float32, in an order that depends
    on shapes and card alone. Raises RuntimeError on a wrong argument, NativeLibraryError on CUDA without a usable library.
    """
    need_library(x[0])
    codes = [ACTIVATIONS.index(name) for name in activation]
    torch.ops.albatross.grouped_linear(list(x), list(weight), codes, workspace(x[0].device), list(out))


def sparse_linear(x: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * (x @ weight) for x that is mostly zero: rows of the weight that meet nothing but zeros are not read.

    x: [T, K] fp16, T at most 8; weight: [K, N] fp16, sizes multiples of 8; out: [T, N] fp16 or fp32, mutated.
    """
    need_library(x)
    torch.ops.albatross.sparse_linear(x, weight, scale, workspace(x.device), out)


def _check_grouped(op: str, arguments: dict[str, Any]) -> None:
    lists = [arguments[name] for name in ("x", "weight", "activation", "out")]
    lengths = [len(each) for each in lists]
    torch._check(
        len(set(lengths)) == 1 and 1 <= lengths[0] <= MAX_PRODUCTS,
        lambda: f"{op}: x, weight, activation and out must be lists of 1 to {MAX_PRODUCTS} entries each, found {lengths}",
    )
    for x, weight, code, out in zip(*lists, strict=True):
        torch._check(0 <= code < len(ACTIVATIONS), lambda code=code: f"{op}: activation must be 0 to 3, found {code}")
        _check_product(op, x, weight, out, is_transposed=False)


def _check_sparse(op: str, arguments: dict[str, Any]) -> None:
    _check_product(op, arguments["x"], arguments["weight"], arguments["out"], is_transposed=True)


def _check_product(op: str, x: Tensor, weight: Tensor, out: Tensor, *, is_transposed: bool) -> None:
    torch._check(
        x.dim() == 2 and x.dtype == torch.float16 and x.stride(-1) == 1 and x.shape[0] <= ROWS_LIMIT,
        lambda: f"{op}: x must be float16 [T, K] with T at most {ROWS_LIMIT}, found {describe(x)}",
    )
    shape = "[K, N]" if is_transposed else "[N, K]"
    k, n = (weight.shape if is_transposed else weight.shape[::-1]) if weight.dim() == 2 else (0, 0)
    torch._check(
        weight.dtype == torch.float16 and k == x.shape[1] and k % 8 == 0 and (n % 8 == 0 or not is_transposed),
        lambda: f"{op}: weight must be float16 {shape} with K = {x.shape[1]}, sizes multiples of 8, found {describe(weight)}",
    )
    torch._check(
        out.shape == (x.shape[0], n) and out.dtype in (torch.float16, torch.float32) and out.device == x.device,
        lambda: f"{op}: out must be float16 or float32 [T, N] = [{x.shape[0]}, {n}] on {x.device}, found {describe(out)}",
    )


def _grouped_meaning(
    x: list[Tensor], weight: list[Tensor], activation: list[int], workspace: Tensor, out: list[Tensor]
) -> None:
    reference.grouped_linear(x, weight, [ACTIVATIONS[code] for code in activation], out)


def _sparse_meaning(x: Tensor, weight: Tensor, scale: float, workspace: Tensor, out: Tensor) -> None:
    reference.sparse_linear(x, weight, scale, out)


register(
    "grouped_linear",
    "Tensor[] x, Tensor[] weight, int[] activation, Tensor(a!) workspace, Tensor(b!)[] out",
    _check_grouped,
    _grouped_meaning,
)
register(
    "sparse_linear",
    "Tensor x, Tensor weight, float scale, Tensor(a!) workspace, Tensor(b!) out",
    _check_sparse,
    _sparse_meaning,
)
