"""The parts of an RWKV-7 layer in plain torch, one function a part, in whatever floating type they are given.

They state the law token by token and aim at nothing else; `rwkv7` here puts them together, the tests compare with them.
Shapes: T tokens of one sequence, C channels, H heads, N head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from albatross.constants import GROUP_NORM_EPS, KK_NORM_EPS, LAYER_NORM_EPS


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x: [T, C]."""
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + LAYER_NORM_EPS) * weight + bias


def group_norm(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalises every head of y [T, H, N] by itself; weight and bias are [C]. Returns [T, C]."""
    mean = y.mean(-1, keepdim=True)
    variance = (y - mean).square().mean(-1, keepdim=True)
    return ((y - mean) / torch.sqrt(variance + GROUP_NORM_EPS)).flatten(1) * weight + bias


def tokenshift(x: Tensor, last: Tensor, mix: Tensor) -> Tensor:
    """x [T, C] moved towards each token's predecessor by mix [C]; `last` [C] is the one before the first token."""
    previous = torch.cat((last[None], x[:-1]))
    return x + (previous - x) * mix


def lora(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """x [T, C] through down [C, rank] and up [rank, C]."""
    return x @ down @ up


def decay(logit: Tensor) -> Tensor:
    """The factor of the state's key channels, in (exp(-exp(-0.5)), 1)."""
    return torch.exp(-torch.exp(-F.softplus(-logit) - 0.5))


def normalise_heads(kk: Tensor) -> Tensor:
    """kk [T, H, N] with every head of length one."""
    norm: Tensor = torch.linalg.vector_norm(kk, dim=-1, keepdim=True)
    return kk / norm.clamp_min(KK_NORM_EPS)


def wkv7(state: Tensor, r: Tensor, d: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over r d k v a b [T, H, N] from state [H, N value, N key]: S = S diag(d) + (S a) b^T + v k^T, y = S r.

    Returns y [T, H, N] and the state after the last token. Source: RWKV-7 "Goose", arXiv 2503.14456, section 4.
    """
    outputs = []
    for r_t, d_t, k_t, v_t, a_t, b_t in zip(r, d, k, v, a, b, strict=True):
        sa = torch.einsum("hvk,hk->hv", state, a_t)
        state = state * d_t[:, None, :] + sa[:, :, None] * b_t[:, None, :] + v_t[:, :, None] * k_t[:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, r_t))
    return torch.stack(outputs), state


def bonus(r: Tensor, k: Tensor, v: Tensor, r_k: Tensor) -> Tensor:
    """What the current token adds to its own output, past the state: r k v [T, H, N], r_k [H, N]. Returns [T, C]."""
    return ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(1)


def cmix(x: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Squared-ReLU channel mix of x [T, C]; key [F, C], value [C, F]."""
    return torch.relu(x @ key.T).square() @ value.T
