"""Inputs and the float64 oracle that the tests of the WKV-7 recurrence share. Written on its own, so that it can
disagree with `albatross.reference`.
"""

import math

import torch
from torch import Tensor

SENTINEL = 77.0  # exact in fp16; fills what must stay untouched


def make_vectors(num_tokens: int, num_heads: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    """r, w, k, v, a, b of the sizes a trained model has: kk is a unit vector, so the state stays bounded."""
    generator = torch.Generator().manual_seed(seed)
    r, w, k, v, kk = (torch.randn(num_tokens, num_heads, 64, generator=generator) for _ in range(5))
    kk = torch.nn.functional.normalize(kk, dim=-1)
    gate = torch.rand(num_tokens, num_heads, 64, generator=generator)
    return [x.to(device, dtype) for x in (r, 3 * w - 2, 0.3 * k, v, -kk, kk * gate)]


def make_pool(num_slots: int, num_heads: int, dtype: torch.dtype, device: str = "cpu", seed: int = 1) -> Tensor:
    """A layer's view of a slot-major pool of three layers, filled with numbers a state may hold."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(num_slots, 3, num_heads, 64, 64, generator=generator).to(device, dtype)
    return pool[:, 1]


def make_spaced_pool(num_slots: int, num_heads: int, gap: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Such states `gap` numbers apart, and what lies between them, [S, gap], all SENTINEL."""
    size = num_heads * 64 * 64
    memory = torch.full((num_slots, size + gap), SENTINEL, dtype=dtype, device=device)
    pool = memory[:, :size].unflatten(1, (num_heads, 64, 64))
    pool.copy_(make_pool(num_slots, num_heads, dtype, device))
    return pool, memory[:, size:]


def oracle(state: Tensor, vectors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One sequence in float64. state: [H, 64, 64]; vectors: six of [T, H, 64]. Returns the last state and y [T, H, 64]."""
    s = state.double().cpu().clone()
    r, w, k, v, a, b = (x.double().cpu() for x in vectors)
    y = torch.zeros_like(r)
    for t in range(r.shape[0]):
        decay = torch.exp(-math.exp(-0.5) / (1 + torch.exp(-w[t])))
        removed = torch.einsum("hij,hj->hi", s, a[t])
        s = torch.einsum("hij,hj->hij", s, decay)
        s += torch.einsum("hi,hj->hij", removed, b[t]) + torch.einsum("hi,hj->hij", v[t], k[t])
        y[t] = torch.einsum("hij,hj->hi", s, r[t])
    return s, y


def oracle_rows(pool: Tensor, vectors: list[Tensor], cu_seqlens: list[int], slots: list[int], y: Tensor) -> tuple[Tensor, Tensor]:
    """What the op must leave behind in (pool, y), in float64; what they must not touch is as it was."""
    pool, y = pool.double().cpu().clone(), y.double().cpu().clone()
    for row, slot in enumerate(slots):
        begin, end = cu_seqlens[row], cu_seqlens[row + 1]
        if slot >= 0 and end > begin:
            pool[slot], y[begin:end] = oracle(pool[slot], [x[begin:end] for x in vectors])
    return pool, y


def tolerance(dtype: torch.dtype, num_tokens: int = 1) -> float:
    """Error allowed against the oracle, relative to the largest number of a result that was rounded to `dtype` at the end.

    One rounding is at most eps / 2. The float32 arithmetic before it adds about 2e-7 a token (measured 3e-7 for the state after
    20 tokens, 4e-6 of 20 for y), and forgets it as the state decays; four times that is granted.
    """
    return torch.finfo(dtype).eps / 2 + 8e-7 * min(num_tokens, 64) ** 0.5


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1))
