"""Calls a model as the engine does, and measures how far two results are apart."""

from collections.abc import Sequence

import torch

from albatross.models.rwkv7 import RWKV7
from albatross.models.state_pool import StatePool


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||."""
    expected = expected.double().cpu()
    return float((found.double().cpu() - expected).norm() / expected.norm())


def run(
    model: RWKV7,
    pool: StatePool,
    rows: Sequence[tuple[int, Sequence[int]]],
    wanted: Sequence[int] | None = None,
    *,
    is_decode: bool = False,
) -> torch.Tensor:
    """Logits of one packed batch of (slot, token ids); of every token, or of those in `wanted`."""
    ends = [0]
    for _, ids in rows:
        ends.append(ends[-1] + len(ids))
    inputs = (
        torch.tensor([token for _, ids in rows for token in ids], dtype=torch.long),
        torch.tensor(ends, dtype=torch.int32),
        torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
        torch.tensor(range(ends[-1]) if wanted is None else wanted, dtype=torch.long),
    )
    return model.forward(*(tensor.to(model.device) for tensor in inputs), pool, is_decode=is_decode)
