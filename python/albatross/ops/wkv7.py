"""Registry entries and typed wrappers of the WKV-7 ops: schema, argument checks, fake and CPU implementation.

The schemas stand here and nowhere else: the ops exist, once, on any machine, and the native library (`csrc/bindings.cpp`)
only adds their CUDA implementations. Knows nothing of models or engines; `models/rwkv7.py` calls the wrappers.
"""

import torch
from torch import Tensor, library

from albatross.constants import HEAD_SIZE
from albatross.ops._loader import load_native
from albatross.reference import wkv7 as reference

_VECTORS = "Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b"
_DTYPES = (torch.float16, torch.float32)

_library = library.Library("albatross", "FRAGMENT")
_library.define(f"wkv7_decode(Tensor(a!) state, {_VECTORS}, Tensor slots, Tensor(b!) y) -> ()")
_library.define(f"wkv7_prefill(Tensor(a!) state, {_VECTORS}, Tensor cu_seqlens, Tensor slots, Tensor(b!) y) -> ()")


def wkv7_decode(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, slots: Tensor, y: Tensor
) -> None:
    """Advance the states of `slots` by one token each, in place, and write S r to `y`.

    In float32: d = exp(-DECAY_SCALE * sigmoid(w)); S = S diag(d) + (S a) b^T + v k^T; y = S r.

    state: [S, H, 64 value, 64 key] fp16 or fp32, mutated; any stride(0), contiguous within a slot.
    r, w, k, v, a, b: [B, H, 64] fp16 or fp32, all alike, contiguous. w is the raw decay logit.
    slots: [B] int32, no two alike unless negative; a negative slot is padding: nothing is read or written for that row.
    y: [B, H, 64], mutated. Raises RuntimeError on a wrong argument, NativeLibraryError on CUDA without a usable library.
    """
    _need_library(state)
    torch.ops.albatross.wkv7_decode(state, r, w, k, v, a, b, slots, y)


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

    As `wkv7_decode`, with r, w, k, v, a, b, y: [T, H, 64], slots: [R] and cu_seqlens: [R + 1] int32, rising from 0 to at
    most T. Tokens past cu_seqlens[R] and those of padding rows are not written. The state is rounded to its type once.
    """
    _need_library(state)
    torch.ops.albatross.wkv7_prefill(state, r, w, k, v, a, b, cu_seqlens, slots, y)


@library.impl(_library, "wkv7_decode", "CPU")
def _decode_cpu(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, slots: Tensor, y: Tensor
) -> None:
    _decode_fake(state, r, w, k, v, a, b, slots, y)
    reference.wkv7_decode(state, r, w, k, v, a, b, slots, y)


@library.impl(_library, "wkv7_prefill", "CPU")
def _prefill_cpu(
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
    _prefill_fake(state, r, w, k, v, a, b, cu_seqlens, slots, y)
    reference.wkv7_prefill(state, r, w, k, v, a, b, cu_seqlens, slots, y)


@library.register_fake("albatross::wkv7_decode", lib=_library)
def _decode_fake(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, slots: Tensor, y: Tensor
) -> None:
    _check_state("wkv7_decode", state)
    _check_vectors("wkv7_decode", state, "B", {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b, "y": y})
    _check_index("wkv7_decode", state, "slots", slots, r.shape[0], "B")


@library.register_fake("albatross::wkv7_prefill", lib=_library)
def _prefill_fake(
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
    _check_state("wkv7_prefill", state)
    _check_vectors("wkv7_prefill", state, "T", {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b, "y": y})
    num_rows = slots.shape[0] if slots.dim() else 0
    _check_index("wkv7_prefill", state, "slots", slots, num_rows, "R")
    _check_index("wkv7_prefill", state, "cu_seqlens", cu_seqlens, num_rows + 1, "R + 1")


def _need_library(state: Tensor) -> None:
    if state.is_cuda:
        load_native(state.device)


# Each refusal says op, argument, expected and found, in the words csrc/checks.h uses for CUDA tensors.


def _check_state(op: str, state: Tensor) -> None:
    torch._check(
        state.dim() == 4
        and state.shape[2:] == (HEAD_SIZE, HEAD_SIZE)
        and state.dtype in _DTYPES
        and state[:1].is_contiguous(),
        lambda: f"{op}: state must be float16 or float32 [S, H, 64, 64], contiguous within a slot, found {_describe(state)}",
    )


def _check_vectors(op: str, state: Tensor, first: str, vectors: dict[str, Tensor]) -> None:
    r = vectors["r"]
    torch._check(r.dtype in _DTYPES, lambda: f"{op}: r must be float16 or float32, found {_describe(r)}")
    shape = (r.shape[0] if r.dim() else 0, state.shape[1], HEAD_SIZE)
    for name, x in vectors.items():
        torch._check(
            x.shape == shape and x.dtype == r.dtype and x.is_contiguous() and x.device == state.device,
            lambda name=name, x=x: (
                f"{op}: {name} must be contiguous {_name(r)} [{first}, H, 64] = {[*shape]} on {state.device}, "
                f"found {_describe(x)}"
            ),
        )


def _check_index(op: str, state: Tensor, name: str, x: Tensor, length: int, text: str) -> None:
    torch._check(
        x.shape == (length,) and x.dtype == torch.int32 and x.is_contiguous() and x.device == state.device,
        lambda: f"{op}: {name} must be contiguous int32 [{text}] = [{length}] on {state.device}, found {_describe(x)}",
    )


def _describe(x: Tensor) -> str:
    return f"{_name(x)} {list(x.shape)} with strides {list(x.stride())} on {x.device}"


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
