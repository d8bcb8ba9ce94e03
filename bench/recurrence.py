"""The ways to compute one layer's recurrence over sequences, and all of time mixing around it, with random inputs.

Knows no model and times nothing: `prefill` does.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from albatross import ops
from bench.vectors import CONSTANTS, random_products, random_vectors

Step = Callable[[], object]
MIXING_VECTORS = 9  # that time mixing moves a token: eight products in, one vector out


class Rows(NamedTuple):
    """The states and the rows of one layer's call."""

    pool: Tensor  # [B, H, 64, 64]
    bounds: Tensor  # [B + 1]
    slots: Tensor  # [B]
    num_tokens: int


class Kernel(NamedTuple):
    """A way to compute the recurrence, or all of time mixing: what makes the call, and how many vectors it moves a token."""

    prepare: Callable[[Rows], Step]
    num_vectors: int


def _call(op: Callable[..., None], *arguments: Tensor | None) -> None:
    op(*arguments)


def scan(rows: Rows) -> Step:
    vectors = random_vectors(rows.num_tokens, rows.pool.shape[1], rows.pool.device)
    return partial(ops.wkv7_prefill, rows.pool, *vectors, rows.bounds, rows.slots, torch.empty_like(vectors[0]))


def chunked_mixing(rows: Rows) -> Step:
    products = random_products(rows.num_tokens, rows.pool.shape[1], rows.pool.device)
    out, segments = torch.empty_like(products["r"]), ops.segment_room(rows.pool.shape[1], rows.num_tokens, rows.pool.device)
    return partial(_call, ops.tmix_prefill, rows.pool, *products.values(), rows.bounds, rows.slots, out, segments)


def scanned_mixing(rows: Rows) -> Step:
    """Three ops: before, in and after the recurrence."""
    x = random_products(rows.num_tokens, rows.pool.shape[1], rows.pool.device)
    *prepared, y, out = torch.empty(7, *x["r"].shape, device=rows.pool.device, dtype=torch.float16)
    heads = [each.unflatten(1, (-1, 64)) for each in (x["r"], *prepared, y)]
    products = [x[name] for name in ("k", "v", "w", "a", "v_gate", "v_first", *CONSTANTS)]
    readout = [x[name] for name in ("g", "r_k", "ln_weight", "ln_bias")]

    def run() -> None:
        _call(ops.tmix_prepare, *products, *prepared)
        _call(ops.wkv7_prefill, rows.pool, *heads[:-1], rows.bounds, rows.slots, heads[-1])
        _call(ops.tmix_readout, y, x["r"], *prepared[1:3], *readout, out)

    return run


KERNELS = {
    "scan": Kernel(scan, 7), "time mixing, scan": Kernel(scanned_mixing, MIXING_VECTORS),
    "time mixing, chunks": Kernel(chunked_mixing, MIXING_VECTORS),
}  # fmt: skip
