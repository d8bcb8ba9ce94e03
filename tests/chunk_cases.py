"""What the tests of chunked time mixing share, on a card (tests/gpu/test_tmix_prefill.py) and on this processor
(tests/unit/test_tmix_prefill_host.py): its cases, the scan that it is held against, and how much less exact it may be.
"""

import torch
from tmix_cases import PREPARE, READOUT, Tensors, bounds, make_tmix, strided

from albatross import ops

MARGIN = 1.5  # times the scan's error that is allowed
FLOOR = 2.5e-4  # of the relative error that rounding a result to fp16 makes on average; what lies below tells nothing
DECAYS = {"weak": -8.0, "mixed": 0.0, "strong": 6.0}  # added to the decay's logit


def make_chunks(num_tokens: int, num_heads: int, decay: str = "mixed", device: str = "cpu", **options: bool) -> Tensors:
    tensors = make_tmix(num_tokens, num_heads, torch.float16, device, **options)
    tensors["w0"] += DECAYS[decay]
    return tensors


def poisoned(tensors: Tensors) -> torch.Tensor:
    """An output that nothing was written to."""
    return strided(torch.full_like(tensors["r"], torch.nan))


def scan(pool: torch.Tensor, tensors: Tensors, lengths: list[int], slots: list[int]) -> torch.Tensor:
    """The same as `tmix_prefill` by the three ops that go token by token."""
    num_tokens, width = tensors["r"].shape
    *prepared, y, r = torch.empty(7, num_tokens, width, dtype=torch.float16, device=pool.device).unbind()
    r.copy_(tensors["r"])
    ops.tmix_prepare(*(tensors[name] for name in PREPARE), *prepared)
    heads = [x.view(num_tokens, -1, 64) for x in (r, *prepared, y)]
    rows = (torch.tensor(x, dtype=torch.int32, device=pool.device) for x in (bounds(lengths), slots))
    ops.wkv7_prefill(pool, *heads[:-1], *rows, heads[-1])
    out = torch.empty_like(y)
    ops.tmix_readout(y, r, prepared[1], prepared[2], *(tensors[name] for name in ("g", *READOUT)), out)
    return out


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the numbers that are expected, as a root of mean squares."""
    is_known = ~expected.isnan()
    difference = found.double().cpu()[is_known] - expected[is_known]
    return float(difference.norm() / expected[is_known].norm())


def assert_no_worse(found: float, scanned: float) -> None:
    assert found <= MARGIN * max(scanned, FLOOR)
