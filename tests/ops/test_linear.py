"""The ops of the matrix products on the CPU, where the reference is their implementation: registration, refusals, results."""

import pytest
import torch
from torch import Tensor

from albatross.constants import CMIX_BOUND, CMIX_SCALE
from albatross.ops.linear import MAX_PRODUCTS, grouped_linear, sparse_linear, workspace


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float16)


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products_of_different_shapes_and_activations_are_computed(dtype: torch.dtype) -> None:
    xs, weights = [randn(3, 64), randn(8, 32)], [randn(40, 64) / 8, randn(24, 32) / 6]
    outs = [empty(3, 40, dtype=dtype), empty(8, 24, dtype=dtype)]
    grouped_linear(xs, weights, ["tanh", "squared_relu"], outs)
    first, second = (x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True))
    torch.testing.assert_close(outs[0].double(), torch.tanh(first), rtol=1e-3, atol=1e-3)
    expected = (second.clamp(0, CMIX_BOUND) * CMIX_SCALE).square()
    torch.testing.assert_close(outs[1].double(), expected, rtol=2e-3, atol=1e-3)


def test_a_sparse_product_is_the_whole_product() -> None:
    x, weight, out = randn(5, 48).relu(), randn(48, 16) / 7, empty(5, 16)
    sparse_linear(x, weight, 64.0, out)
    torch.testing.assert_close(out.double(), 64 * x.double() @ weight.double(), rtol=1e-3, atol=1e-2)


def test_opcheck_accepts_both_ops() -> None:
    x, weight, out, space = randn(3, 64), randn(40, 64), empty(3, 40), workspace(torch.device("cpu"))
    torch.library.opcheck(torch.ops.albatross.grouped_linear.default, ([x], [weight], [1], space, [out]))
    torch.library.opcheck(torch.ops.albatross.sparse_linear.default, (x, randn(64, 40), 2.0, space, out))


REFUSALS = [
    ([randn(9, 64)], [randn(40, 64)], [empty(9, 40)], "T at most 8"),
    ([randn(3, 64)], [randn(40, 72)], [empty(3, 40)], "K = 64"),
    ([randn(3, 64)], [randn(40, 64).float()], [empty(3, 40)], "weight must be float16"),
    ([randn(3, 64)], [randn(40, 64)], [empty(3, 41)], r"\[3, 40\]"),
    ([randn(3, 64)] * (MAX_PRODUCTS + 1), [randn(40, 64)] * (MAX_PRODUCTS + 1), [empty(3, 40)] * (MAX_PRODUCTS + 1), "1 to 32"),
]


@pytest.mark.parametrize(("x", "weight", "out", "text"), REFUSALS)
def test_wrong_arguments_are_refused_by_name(x: list[Tensor], weight: list[Tensor], out: list[Tensor], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        grouped_linear(x, weight, ["none"] * len(x), out)


def test_a_sparse_product_needs_whole_pieces_of_eight() -> None:
    with pytest.raises(RuntimeError, match="multiples of 8"):
        sparse_linear(randn(2, 16), randn(16, 12), 1.0, empty(2, 12))
