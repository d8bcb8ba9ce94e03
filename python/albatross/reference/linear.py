"""The matrix products of the forward pass in plain torch: the meaning of the native ops of the same names, and their CPU
implementation. Sums are in float32, or in float64 where x is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from albatross.constants import CMIX_BOUND, CMIX_SCALE

ACTIVATIONS = ("none", "tanh", "sigmoid", "squared_relu")


def grouped_linear(x: Sequence[Tensor], weight: Sequence[Tensor], activation: Sequence[str], out: Sequence[Tensor]) -> None:
    """out[i] = activation[i](x[i] @ weight[i]^T). x: [T, K], weight: [N, K], out: [T, N], any strides, written in place.

    "squared_relu" of float16 is scaled: (CMIX_SCALE * min(max(x, 0), CMIX_BOUND))^2.
    """
    for each_x, each_weight, name, each_out in zip(x, weight, activation, out, strict=True):
        each_out.copy_(_activate(_wide(each_x) @ _wide(each_weight).T, name, each_x.dtype))


def sparse_linear(x: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * (x @ weight). x: [T, K], weight: [K, N], out: [T, N], written in place."""
    out.copy_(scale * (_wide(x) @ _wide(weight)))


def _activate(x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    if name == "tanh":
        return torch.tanh(x)
    if name == "sigmoid":
        return torch.sigmoid(x)
    if name == "squared_relu":
        return (x.clamp(0, CMIX_BOUND) * CMIX_SCALE).square() if dtype == torch.float16 else torch.relu(x).square()
    return x


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
