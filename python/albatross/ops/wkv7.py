"""Registry entry and typed wrapper of the WKV-7 recurrence over sequences: schema, argument checks, fake and CPU implementation.

The schema stands here and nowhere else. Knows nothing of models or engines; `models/rwkv7.py` calls the wrapper.
"""

import torch
from torch import Tensor

from albatross.constants import HEAD_SIZE
from albatross.ops._checks import FLOATS, check, check_contiguous, check_state, size
from albatross.ops._registry import Tensors, need_library, register
from albatross.reference import wkv7 as reference


def wkv7_prefill(
    state: Tensor,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    y: Tensor,
) -> None:
    """Advance the states of `slots` by one sequence of packed tokens each, in place, and write S r of every token to `y`.

    In float32, for each token: d = exp(-DECAY_SCALE * sigmoid(w)); S = S diag(d) + (S a) b^T + v k^T; y = S r.

    state: [S, H, 64 value, 64 key] fp16 or fp32, mutated; any stride(0), contiguous within a slot. Rounded to its type once.
    r, w, k, v, a, b: [T, H, 64] fp16 or fp32, all alike, contiguous. w is the raw decay logit.
    cu_seqlens: [R + 1] int32, rising from 0 to at most T: sequence i is tokens cu_seqlens[i] : cu_seqlens[i + 1].
    slots: [R] int32, no two alike unless negative; a negative slot is padding: nothing is read or written for that row.
    y: [T, H, 64], mutated but for tokens past cu_seqlens[R] and those of padding rows.
    Raises RuntimeError on a wrong argument, NativeLibraryError on CUDA without a usable library.
    """
    need_library(state)
    torch.ops.albatross.wkv7_prefill(state, r, w, k, v, a, b, cu_seqlens, slots, y)


def _check_prefill(op: str, tensors: Tensors) -> None:
    state, r, slots = (tensors[name] for name in ("state", "r", "slots"))
    check_state(op, state)
    check(op, "r", r, r.dtype in FLOATS, "float16 or float32")
    shape = (size(r), state.shape[1], HEAD_SIZE)
    for name in ("r", "w", "k", "v", "a", "b", "y"):
        check_contiguous(op, name, tensors[name], r.dtype, shape, "[T, H, 64]", state)
    check_contiguous(op, "slots", slots, torch.int32, (size(slots),), "[R]", state)
    check_contiguous(op, "cu_seqlens", tensors["cu_seqlens"], torch.int32, (size(slots) + 1,), "[R + 1]", state)


register(
    "wkv7_prefill",
    "Tensor(a!) state, Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, Tensor cu_seqlens, Tensor slots, Tensor(b!) y",
    _check_prefill,
    reference.wkv7_prefill,
)
