"""Registry entries and typed wrappers of what stands between the matrix products of a layer, but for the bare recurrence over
sequences (`wkv7.py`): schemas, argument checks, fakes and CPU implementations.

The schemas stand here and nowhere else; the native library (`csrc/bindings.cpp`) only adds CUDA implementations. "fp" is fp16 or
fp32, one type for all of a call. Knows nothing of models or engines; `models/rwkv7.py` calls the wrappers. All raise RuntimeError
on a wrong argument, NativeLibraryError on CUDA without a usable library.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from albatross.constants import HEAD_SIZE
from albatross.ops._checks import FLOATS, check, check_contiguous, check_leading_rows, check_rows, check_state, size
from albatross.ops._registry import Tensors, need_library, register
from albatross.ops.wkv7 import wkv7_prefill
from albatross.reference import tmix as reference

MAX_MIXES = 8  # of one add_norm_mix
LEAST_TOKENS = 512  # of a step in which sequences are split
LEAST_SEGMENTS = 3  # what is made of parts beforehand costs more than two of them save

_NORM = "Tensor x, Tensor? delta, Tensor ln_weight, Tensor ln_bias"
_BIASES = "Tensor w0, Tensor a0, Tensor? v0, Tensor k_k, Tensor k_a"
_READOUT = "Tensor r_k, Tensor ln_weight, Tensor ln_bias"
_TIME_MIX = (
    "Tensor(a!) state, Tensor r, Tensor k, Tensor v, Tensor w, Tensor a, Tensor? v_gate, Tensor g, Tensor? v_first, "
    f"{_BIASES}, {_READOUT}"
)


def add_norm_mix(
    x: Tensor,
    delta: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    mix: Tensor,
    shift: Tensor,
    cu_seqlens: Tensor,
    token_rows: Tensor,
    slots: Tensor,
    x_out: Tensor,
    mixed: Tensor,
) -> None:
    """Residual addition, layer norm, token shift and its mixes, with the shift state read and replaced in place.

    x_out = x + delta; y = LN(x_out), rounded to fp; mixed[m] = y + (y of the token before - y) * mix[m]. Before a row's first
    token stands shift[slot] (zero in a padding row), which is then replaced by y of the row's last token.

    x, x_out: [T, C] fp32, contiguous, not overlapping; x_out is mutated. C is a multiple of 64, on CUDA 8,192 at most.
    delta: [T, C] fp, rows any multiple of 8 numbers apart, or None for zero. ln_weight, ln_bias: [C] fp32.
    mix: [M, C] fp, contiguous, M from 1 to 8. shift: [S, C] fp, rows as delta's, mutated.
    cu_seqlens: [R + 1] int32, rising from 0 to at most T. token_rows: [T] int32, the row each token is in by cu_seqlens.
    slots: [R] int32, no two alike unless negative; a negative slot is padding, and so is a token past the last row.
    mixed: [M, T, C] fp, contiguous, mutated.
    """
    need_library(x)
    torch.ops.albatross.add_norm_mix(x, delta, ln_weight, ln_bias, mix, shift, cu_seqlens, token_rows, slots, x_out, mixed)


def add_norm(x: Tensor, delta: Tensor | None, ln_weight: Tensor, ln_bias: Tensor, index: Tensor, out: Tensor) -> None:
    """out[i] = LN(x[index[i]] + delta[index[i]]); x, delta and ln_* as for `add_norm_mix`.

    index: [K] int64, may repeat. out: [K, C] fp, rows any multiple of 8 numbers apart, mutated.
    """
    need_library(x)
    torch.ops.albatross.add_norm(x, delta, ln_weight, ln_bias, index, out)


def tmix_decode(
    state: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    a: Tensor,
    v_gate: Tensor | None,
    g: Tensor,
    v_first: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    r_k: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    slots: Tensor,
    out: Tensor,
) -> None:
    """Time mixing of one token a row, from the products of its mixed inputs to what the output matrix multiplies.

    In float32, with S [value, key] of each head: d = exp(-DECAY_SCALE sigmoid(w + w0)); A = sigmoid(a + a0);
    v += (v_first - v) sigmoid(v_gate + v0); kk = k k_k / |k k_k|; k = k (1 + (A - 1) k_a);
    S = S diag(d) - (S kk)(kk A)^T + v k^T; out = (GroupNorm(S r) + (sum of r k r_k) v) g.

    state: [S, H, 64 value, 64 key] fp16 or fp32, mutated; any stride(0), contiguous within a slot.
    r, k, v, w, a, v_gate, g, v_first: [T, C] fp, rows any multiple of 8 numbers apart: the raw products, w, a and v_gate without
    their biases. v_gate, v_first and v0 are None in layer 0.
    w0, a0, v0, k_k, k_a, ln_weight, ln_bias: [C] fp32. r_k: [H, 64] fp32.
    slots: [T] int32, no two alike unless negative; a negative slot is padding: no state is touched and out is zero.
    out: [T, C] fp, rows as above, mutated.
    """
    need_library(r)
    torch.ops.albatross.tmix_decode(
        state, r, k, v, w, a, v_gate, g, v_first, w0, a0, v0, k_k, k_a, r_k, ln_weight, ln_bias, slots, out
    )  # fmt: skip


def tmix_prefill(
    state: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    a: Tensor,
    v_gate: Tensor | None,
    g: Tensor,
    v_first: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    r_k: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    out: Tensor,
    segments: Tensor | None = None,
) -> None:
    """Time mixing of one packed sequence a row, by the law of `tmix_decode`; arguments up to ln_bias as there.

    On CUDA tensor cores take 16 tokens of fp16 at a time: operands are rounded to fp16, sums and the state in between are fp32.
    For fp32 vectors it is `prefill_by_scan`. Where few heads and sequences would leave the card idle, it takes parts of a long
    sequence at once, if there is room for what they hand on to each other.

    cu_seqlens: [R + 1] int32, rising from 0 to at most T: sequence i is tokens cu_seqlens[i] : cu_seqlens[i + 1].
    slots: [R] int32, no two alike unless negative; a negative slot is padding: nothing is read or written for that row.
    out: [T, C] fp, rows any multiple of 8 numbers apart, mutated but for tokens past cu_seqlens[R] and those of padding rows.
    segments: [N, H, 2, 64, 64] fp32, contiguous, mutated, of `segment_room`: long sequences are split into up to N parts, all
    together. None: none is split. Only CUDA uses it; the parts change the last bits of the result, the room's contents do not.
    """
    need_library(r)
    if r.is_cuda and r.dtype == torch.float32:
        prefill_by_scan(
            state, r, k, v, w, a, v_gate, g, v_first, w0, a0, v0, k_k, k_a, r_k, ln_weight, ln_bias, cu_seqlens, slots, out
        )  # fmt: skip
        return
    torch.ops.albatross.tmix_prefill(
        state, r, k, v, w, a, v_gate, g, v_first, w0, a0, v0, k_k, k_a, r_k, ln_weight, ln_bias, cu_seqlens, slots, out, segments
    )  # fmt: skip


def segment_room(num_heads: int, num_tokens: int, device: torch.device) -> Tensor | None:
    """The `segments` of `tmix_prefill` for a step of so many tokens: as many as let one sequence fill the card, or None where
    that saves no time. One room serves call after call on a stream."""
    if device.type != "cuda" or num_tokens < LEAST_TOKENS:
        return None
    num_segments = torch.cuda.get_device_properties(device).multi_processor_count // num_heads
    if num_segments < LEAST_SEGMENTS:
        return None
    return torch.empty(num_segments, num_heads, 2, HEAD_SIZE, HEAD_SIZE, device=device)


def prefill_by_scan(
    state: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    a: Tensor,
    v_gate: Tensor | None,
    g: Tensor,
    v_first: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    r_k: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    out: Tensor,
) -> None:
    """`tmix_prefill` token by token, by `tmix_prepare`, `wkv7_prefill` and `tmix_readout`; allocates what lies between them."""
    *prepared, y, read = torch.empty(7, *r.shape, dtype=r.dtype, device=r.device).unbind()
    tmix_prepare(k, v, w, a, v_gate, v_first, w0, a0, v0, k_k, k_a, *prepared)
    logit, k, v, minus_kk, b = prepared
    heads = [x.view(len(r), -1, HEAD_SIZE) for x in (r.contiguous(), logit, k, v, minus_kk, b, y)]
    wkv7_prefill(state, heads[0], heads[1], heads[2], heads[3], heads[4], heads[5], cu_seqlens, slots, heads[6])
    tmix_readout(y, r, k, v, g, r_k, ln_weight, ln_bias, read)
    rows = torch.searchsorted(cu_seqlens[1:], torch.arange(len(r), device=r.device, dtype=torch.int32), right=True)
    is_written = torch.cat((slots >= 0, slots.new_zeros(1, dtype=torch.bool)))[rows]
    torch.where(is_written[:, None], read, out, out=out)


def tmix_prepare(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    a: Tensor,
    v_gate: Tensor | None,
    v_first: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    w_out: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    minus_kk: Tensor,
    b: Tensor,
) -> None:
    """What `wkv7_prefill` takes of the raw products, by the law of `tmix_decode`; arguments up to k_a as there.

    w_out: w + w0, the decay's logit; k_out, v_out: k and v as the state takes them; minus_kk: -kk; b: kk A. All [T, C] fp,
    contiguous, mutated.
    """
    need_library(k)
    torch.ops.albatross.tmix_prepare(k, v, w, a, v_gate, v_first, w0, a0, v0, k_k, k_a, w_out, k_out, v_out, minus_kk, b)


def tmix_readout(
    y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, ln_weight: Tensor, ln_bias: Tensor, out: Tensor
) -> None:
    """out = (GroupNorm(y) + (sum of r k r_k) v) g, for y of `wkv7_prefill`, k and v of `tmix_prepare`.

    y, r, k, v, g, out: [T, C] fp, rows any multiple of 8 numbers apart; out is mutated.
    r_k: [H, 64] fp32. ln_weight, ln_bias: [C] fp32.
    """
    need_library(y)
    torch.ops.albatross.tmix_readout(y, r, k, v, g, r_k, ln_weight, ln_bias, out)


def squared_relu(x: Tensor) -> None:
    """In place max(x, 0)^2, in fp16 (min(max(x, 0), CMIX_BOUND) * CMIX_SCALE)^2. x: fp of any shape, contiguous, mutated."""
    need_library(x)
    torch.ops.albatross.squared_relu(x)


_PRODUCTS = ("k", "v", "w", "a", "v_gate", "v_first")
_BIASES_AND_SCALES = ("w0", "a0", "v0", "k_k", "k_a")


def _check_norm(op: str, tensors: Tensors, dtype: torch.dtype) -> None:
    x = tensors["x"]
    check_leading_rows(op, "x", x)
    check_contiguous(op, "x", x, torch.float32, x.shape, "[T, C]", x)
    if "delta" in tensors:
        check_rows(op, "delta", tensors["delta"], dtype, x.shape, "[T, C]", x)
    _check_constants(op, tensors, ("ln_weight", "ln_bias"), x)


def _check_add_norm_mix(op: str, tensors: Tensors) -> None:
    x, mix, shift, slots = (tensors[name] for name in ("x", "mix", "shift", "slots"))
    is_mix = mix.dtype in FLOATS and mix.dim() == 2 and 1 <= mix.shape[0] <= MAX_MIXES
    check(op, "mix", mix, is_mix, f"float16 or float32 [M, C] with M from 1 to {MAX_MIXES}")
    _check_norm(op, tensors, mix.dtype)
    (num_tokens, num_channels), num_mixes, num_rows = x.shape, mix.shape[0], size(slots)
    check_contiguous(op, "mix", mix, mix.dtype, (num_mixes, num_channels), "[M, C]", x)
    check_rows(op, "shift", shift, mix.dtype, (size(shift), num_channels), "[S, C]", x)
    check_contiguous(op, "cu_seqlens", tensors["cu_seqlens"], torch.int32, (num_rows + 1,), "[R + 1]", x)
    check_contiguous(op, "token_rows", tensors["token_rows"], torch.int32, (num_tokens,), "[T]", x)
    check_contiguous(op, "slots", slots, torch.int32, (num_rows,), "[R]", x)
    check_contiguous(op, "x_out", tensors["x_out"], torch.float32, x.shape, "[T, C]", x)
    check_contiguous(op, "mixed", tensors["mixed"], mix.dtype, (num_mixes, num_tokens, num_channels), "[M, T, C]", x)


def _check_add_norm(op: str, tensors: Tensors) -> None:
    x, index, out = tensors["x"], tensors["index"], tensors["out"]
    check(op, "out", out, out.dtype in FLOATS, "float16 or float32 [K, C]")
    _check_norm(op, tensors, out.dtype)
    check_contiguous(op, "index", index, torch.int64, (size(index),), "[K]", x)
    check_rows(op, "out", out, out.dtype, (size(index), x.shape[1]), "[K, C]", x)


def _check_decode(op: str, tensors: Tensors) -> None:
    _check_time_mix(op, tensors)
    check_contiguous(op, "slots", tensors["slots"], torch.int32, tensors["r"].shape[:1], "[T]", tensors["r"])


def _check_prefill(op: str, tensors: Tensors) -> None:
    _check_time_mix(op, tensors)
    r, slots = tensors["r"], tensors["slots"]
    check_contiguous(op, "slots", slots, torch.int32, (size(slots),), "[R]", r)
    check_contiguous(op, "cu_seqlens", tensors["cu_seqlens"], torch.int32, (size(slots) + 1,), "[R + 1]", r)
    if "segments" in tensors:
        segments, num_heads = tensors["segments"], tensors["state"].shape[1]
        shape = (size(segments), num_heads, 2, HEAD_SIZE, HEAD_SIZE)
        check_contiguous(op, "segments", segments, torch.float32, shape, "[N, H, 2, 64, 64]", r)


def _check_time_mix(op: str, tensors: Tensors) -> None:
    state, r = tensors["state"], tensors["r"]
    check_state(op, state)
    check_leading_rows(op, "r", r)
    width = state.shape[1] * HEAD_SIZE
    is_good = r.shape[1] == width and r.device == state.device
    check(op, "r", r, is_good, f"[T, C] with C = {width} on {state.device}")
    _check_gate(op, tensors)
    _check_rows(op, tensors, ("r", *_PRODUCTS, "g"), r)
    _check_constants(op, tensors, _BIASES_AND_SCALES, r)
    _check_readout(op, tensors, r)
    _check_rows(op, tensors, ("out",), r)


def _check_prepare(op: str, tensors: Tensors) -> None:
    k = tensors["k"]
    check_leading_rows(op, "k", k)
    _check_gate(op, tensors)
    _check_rows(op, tensors, _PRODUCTS, k)
    _check_constants(op, tensors, _BIASES_AND_SCALES, k)
    for name in ("w_out", "k_out", "v_out", "minus_kk", "b"):
        check_contiguous(op, name, tensors[name], k.dtype, k.shape, "[T, C]", k)


def _check_tmix_readout(op: str, tensors: Tensors) -> None:
    y = tensors["y"]
    check_leading_rows(op, "y", y)
    _check_rows(op, tensors, ("y", "r", "k", "v", "g"), y)
    _check_readout(op, tensors, y)
    _check_rows(op, tensors, ("out",), y)


def _check_squared_relu(op: str, tensors: Tensors) -> None:
    x = tensors["x"]
    check(op, "x", x, x.dtype in FLOATS and x.is_contiguous(), "contiguous float16 or float32")


def _check_gate(op: str, tensors: Tensors) -> None:
    is_whole = len({name in tensors for name in ("v_gate", "v_first", "v0")}) == 1
    torch._check(is_whole, lambda: f"{op}: v_gate, v_first and v0 must be given together, or none of them")


def _check_readout(op: str, tensors: Tensors, like: Tensor) -> None:
    shape = (like.shape[1] // HEAD_SIZE, HEAD_SIZE)
    check_contiguous(op, "r_k", tensors["r_k"], torch.float32, shape, "[H, 64]", like)
    _check_constants(op, tensors, ("ln_weight", "ln_bias"), like)


def _check_rows(op: str, tensors: Tensors, names: Sequence[str], like: Tensor) -> None:
    for name in names:
        if name in tensors:
            check_rows(op, name, tensors[name], like.dtype, like.shape, "[T, C]", like)


def _check_constants(op: str, tensors: Tensors, names: Sequence[str], like: Tensor) -> None:
    for name in names:
        if name in tensors:
            check_contiguous(op, name, tensors[name], torch.float32, like.shape[1:], "[C]", like)


register(
    "add_norm_mix",
    f"{_NORM}, Tensor mix, Tensor(a!) shift, Tensor cu_seqlens, Tensor token_rows, Tensor slots, "
    "Tensor(b!) x_out, Tensor(c!) mixed",
    _check_add_norm_mix,
    reference.add_norm_mix,
)
register("add_norm", f"{_NORM}, Tensor index, Tensor(a!) out", _check_add_norm, reference.add_norm)
register("tmix_decode", f"{_TIME_MIX}, Tensor slots, Tensor(b!) out", _check_decode, reference.tmix_decode)
register(
    "tmix_prefill",
    f"{_TIME_MIX}, Tensor cu_seqlens, Tensor slots, Tensor(b!) out, Tensor(c!)? segments",
    _check_prefill,
    reference.tmix_prefill,
)
register(
    "tmix_prepare",
    f"Tensor k, Tensor v, Tensor w, Tensor a, Tensor? v_gate, Tensor? v_first, {_BIASES}, "
    "Tensor(a!) w_out, Tensor(b!) k_out, Tensor(c!) v_out, Tensor(d!) minus_kk, Tensor(e!) b",
    _check_prepare,
    reference.tmix_prepare,
)
register(
    "tmix_readout",
    f"Tensor y, Tensor r, Tensor k, Tensor v, Tensor g, {_READOUT}, Tensor(a!) out",
    _check_tmix_readout,
    reference.tmix_readout,
)
register("squared_relu", "Tensor(a!) x", _check_squared_relu, reference.squared_relu)
