"""What surrounds the matrix products of a layer, in plain torch: the meaning of the ops in `ops/tmix.py`, and their CPU
implementation.

Same names and arguments as `albatross.ops`, on any device. Arithmetic is in float32, or in float64 where the arguments are;
rounded are only the outputs, each once, and LN outputs, to the model's type. Knows nothing of the op registry and checks
nothing: `ops/tmix.py` does both.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from albatross.constants import CMIX_BOUND, CMIX_SCALE, DECAY_SCALE, GROUP_NORM_EPS, HEAD_SIZE, KK_NORM_EPS, LAYER_NORM_EPS
from albatross.reference.wkv7 import advance, prepare, wkv7_prefill


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
    """x_out = x + delta; y = LN(x_out), rounded to mixed's type; mixed[m] = y + (previous y - y) * mix[m].

    The token before a row's first one is shift[slot], or zero in a padding row; shift[slot] becomes y of the row's last token.
    x, x_out: [T, C]. delta: [T, C] or None for zero. ln_weight, ln_bias: [C]. mix: [M, C]. shift: [S, C], changed in place.
    cu_seqlens: [R + 1]. token_rows: [T], each token's row, which follows from cu_seqlens. slots: [R], negative for padding.
    mixed: [M, T, C]. A token past the last row is a padding row of its own.
    """
    if delta is None:
        x_out.copy_(x)
    else:
        torch.add(x, delta, out=x_out)
    y = _as_type(_layer_norm(x_out, ln_weight, ln_bias), mixed.dtype)
    previous = _exchange(y, shift, cu_seqlens.tolist(), slots)
    y = _as_type(y, _compute_dtype(y))
    torch.addcmul(y, previous - y, mix.unsqueeze(1), out=mixed)


def add_norm(x: Tensor, delta: Tensor | None, ln_weight: Tensor, ln_bias: Tensor, index: Tensor, out: Tensor) -> None:
    """out[i] = LN(x[index[i]] + delta[index[i]]). x: [T, C]. delta: [T, C] or None for zero. index: [K]. out: [K, C]."""
    chosen = x.index_select(0, index)
    if delta is not None:
        chosen += delta.index_select(0, index)
    out.copy_(_layer_norm(chosen, ln_weight, ln_bias))


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

    state: [S, H, 64 value, 64 key], that of `slots` advanced in place by the recurrence of `wkv7.advance`.
    r, k, v, w, a, v_gate, g: [T, C], the raw products; w, a and v_gate lack their biases w0, a0, v0 [C]. v_first: [T, C].
    k_k, k_a: [C]. r_k: [H, 64]. ln_weight, ln_bias: [C]. slots: [T]; a negative one is padding. out: [T, C], zero for padding.
    v_gate, v_first and v0 are None in layer 0.
    """
    places = slots.tolist()
    if min(places, default=0) < 0:
        rows = torch.nonzero(slots >= 0).squeeze(1)
        r, k, v, w, a, g = (x[rows] for x in (r, k, v, w, a, g))
        v_gate, v_first = (None if x is None else x[rows] for x in (v_gate, v_first))
        written = out.new_empty(g.shape)
        tmix_decode(
            state, r, k, v, w, a, v_gate, g, v_first, w0, a0, v0, k_k, k_a, r_k, ln_weight, ln_bias, slots[rows], written
        )  # fmt: skip
        out.zero_().index_copy_(0, rows, written)
        return
    s = state.index_select(0, slots)
    s = _as_type(s, _compute_dtype(state if state.dtype == torch.float64 else r))
    k, v, kk, b = _mix_values(s.dtype, k, v, a, v_gate, v_first, a0, v0, k_k, k_a)
    r = _heads(_as_type(r, s.dtype))
    decay = _heads((w + w0).sigmoid_().mul_(-DECAY_SCALE).exp_())
    y = advance(s.flatten(0, 1), *prepare(r, decay, k, v, kk.neg_(), b)).view(r.shape)
    for place, row in zip(places, s.unbind(), strict=True):  # faster than index_copy_, by a third of the copies' time
        state[place].copy_(row)
    _read_out(y, r, k, v, g, r_k, ln_weight, ln_bias, out)


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
    """Time mixing of one packed sequence a row: `tmix_prepare`, `wkv7_prefill` and `tmix_readout`, whose arguments these are.

    slots: [R]; a negative one is padding. out: [T, C], written for the tokens of rows that are none. segments:
    left alone, since no row is split here.
    """
    r = _as_type(r, _compute_dtype(state if state.dtype == torch.float64 else r))
    *prepared, y = torch.empty(6, *r.shape, dtype=r.dtype, device=r.device).unbind()
    tmix_prepare(k, v, w, a, v_gate, v_first, w0, a0, v0, k_k, k_a, *prepared)
    logit, k, v, minus_kk, b = prepared
    wkv7_prefill(
        state, _heads(r), _heads(logit), _heads(k), _heads(v), _heads(minus_kk), _heads(b), cu_seqlens, slots, _heads(y)
    )
    bounds = cu_seqlens.tolist()
    for begin, end, slot in zip(bounds, bounds[1:], slots.tolist(), strict=False):
        if slot >= 0 and end > begin:
            row = slice(begin, end)
            tmix_readout(y[row], r[row], k[row], v[row], g[row], r_k, ln_weight, ln_bias, out[row])


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
    """What `wkv7_prefill` takes of the products of the mixed inputs, as in `tmix_decode`; all [T, C] but the constants [C].

    w_out is the decay's logit w + w0; minus_kk and b are the recurrence's a and b.
    """
    dtype = _compute_dtype(k)
    torch.add(w, w0, out=w_out)
    k, v, kk, kk_gate = _mix_values(dtype, k, v, a, v_gate, v_first, a0, v0, k_k, k_a)
    for target, result in ((k_out, k), (v_out, v), (minus_kk, -kk), (b, kk_gate)):
        _heads(target).copy_(result)


def tmix_readout(
    y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, ln_weight: Tensor, ln_bias: Tensor, out: Tensor
) -> None:
    """out = (GroupNorm(y) + (sum over the head of r k r_k) v) g, y being what `wkv7_prefill` gave for k and v.

    y, r, k, v, g, out: [T, C]. r_k: [H, 64]. ln_weight, ln_bias: [C].
    """
    dtype = _compute_dtype(y)
    y, r, k, v = (_heads(_as_type(x, dtype)) for x in (y, r, k, v))
    _read_out(y, r, k, v, g, r_k, ln_weight, ln_bias, out)


def squared_relu(x: Tensor) -> None:
    """In place max(x, 0)^2; in float16 (min(max(x, 0), CMIX_BOUND) * CMIX_SCALE)^2, see `constants`."""
    if x.dtype == torch.float16:
        x.clamp_(0, CMIX_BOUND).mul_(CMIX_SCALE).square_()
    else:
        x.relu_().square_()


def _exchange(y: Tensor, shift: Tensor, bounds: list[int], slots: Tensor) -> Tensor:
    """The predecessor of every token in y [T, C]; shift [S, C] has those of the rows' first tokens, and gets the last ones."""
    rows = [(start, end - 1, slot) for start, end, slot in zip(bounds, bounds[1:], slots.tolist(), strict=False) if start < end]
    live = [row for row in rows if row[2] >= 0]
    if len(live) == slots.shape[0] == y.shape[0]:  # one token a row
        index = slots.long()
        previous = shift.index_select(0, index)
        shift.index_copy_(0, index, y)
        return previous
    previous = y.roll(1, 0)
    previous[[*(start for start, _, slot in rows if slot < 0), *range(bounds[-1], y.shape[0])]] = 0
    if live:
        starts, lasts, index = torch.tensor(live, device=y.device).unbind(1)
        previous.index_copy_(0, starts, shift.index_select(0, index))
        shift.index_copy_(0, index, y.index_select(0, lasts))
    return previous


def _mix_values(
    dtype: torch.dtype,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    v_gate: Tensor | None,
    v_first: Tensor | None,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k and v as the state takes them, kk and kk * sigmoid(a), all [T, H, 64] in `dtype`."""
    k, v = _as_type(k, dtype), _as_type(v, dtype)
    if v_gate is not None and v_first is not None and v0 is not None:
        v = torch.lerp(v, _as_type(v_first, dtype), (v_gate + v0).sigmoid_())
    gate = (a + a0).sigmoid_()
    kk = _heads(k * k_k)
    kk /= torch.linalg.vector_norm(kk, dim=-1, keepdim=True).clamp_min_(KK_NORM_EPS)
    k = torch.lerp(k, k * gate, _as_type(k_a, dtype))  # k (1 + (gate - 1) k_a)
    return _heads(k), _heads(v), kk, kk * _heads(gate)


def _read_out(
    y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, ln_weight: Tensor, ln_bias: Tensor, out: Tensor
) -> None:
    """`tmix_readout` of y r k v [T, H, 64] in the type of y."""
    bonus = (r * k * r_k).sum(-1, keepdim=True)
    normalised = F.group_norm(y.flatten(1), y.shape[1], _as_type(ln_weight, y.dtype), _as_type(ln_bias, y.dtype), GROUP_NORM_EPS)
    torch.mul(torch.addcmul(_heads(normalised), bonus, v).flatten(1), g, out=out)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, _as_type(weight, x.dtype), _as_type(bias, x.dtype), LAYER_NORM_EPS)


def _heads(x: Tensor) -> Tensor:
    """[T, C] as [T, H, 64], the same memory."""
    return x.view(x.shape[0], x.shape[1] // HEAD_SIZE, HEAD_SIZE)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which takes as long as adding two rows even where it has nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)
