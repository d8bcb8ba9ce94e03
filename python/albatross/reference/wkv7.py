"""The WKV-7 recurrence in plain torch: the meaning of the two native ops, and their CPU implementation.

Same names and arguments as `albatross.ops`, on any device and in any floating type; arithmetic is in float32, or in
float64 where the state is. Knows nothing of the op registry and checks nothing: `ops/wkv7.py` does both.
"""

import torch
from torch import Tensor

from albatross.constants import DECAY_SCALE


def wkv7_decode(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, slots: Tensor, y: Tensor
) -> None:
    """Advance the states of `slots` by one token each, in place, and write what is read from them to `y`.

    state: [S, H, 64 value, 64 key], changed in place. r, w, k, v, a, b: [B, H, 64]. slots: [B]; a negative one is padding.
    y: [B, H, 64], written in place except for padding rows. Law: see `_advance`; the decay is exp(-DECAY_SCALE * sigmoid(w)).
    """
    is_row = slots >= 0
    if not bool(is_row.all()):
        rows = torch.nonzero(is_row).squeeze(1)
        out = y[rows]
        wkv7_decode(state, r[rows], w[rows], k[rows], v[rows], a[rows], b[rows], slots[rows], out)
        y.index_copy_(0, rows, out)
        return
    index = slots.long()
    s = state.index_select(0, index).to(_compute_dtype(state))
    y.copy_(_advance(s, *_prepare(s.dtype, r, w, k, v, a, b)))
    state.index_copy_(0, index, s.to(state.dtype))


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
    """Advance the states of `slots` by one sequence each, in place; sequence i is tokens cu_seqlens[i] : cu_seqlens[i + 1].

    As `wkv7_decode`, but r, w, k, v, a, b and y are packed [T, H, 64] and cu_seqlens is [R + 1], slots [R]. A state is
    rounded to its own type once, after its last token. Rows of padding slots and of no tokens change nothing.
    """
    bounds = cu_seqlens.tolist()
    rows = [i for i, slot in enumerate(slots.tolist()) if slot >= 0 and bounds[i + 1] > bounds[i]]
    if not rows:
        return
    rows.sort(key=lambda i: bounds[i] - bounds[i + 1])  # longest first: the rows that still run are always a prefix
    lengths = [bounds[i + 1] - bounds[i] for i in rows]
    num_running = [sum(length > t for length in lengths) for t in range(lengths[0])]
    order = torch.tensor([bounds[i] + t for t, n in enumerate(num_running) for i in rows[:n]], device=y.device)

    index = slots[torch.tensor(rows, device=slots.device)].long()
    s = state.index_select(0, index).to(_compute_dtype(state))
    inputs = _prepare(s.dtype, *(x.index_select(0, order) for x in (r, w, k, v, a, b)))
    out = s.new_empty(len(order), *y.shape[1:])
    begin = 0
    for n in num_running:
        end = begin + n
        out[begin:end] = _advance(s[:n], *(x[begin:end] for x in inputs))
        begin = end
    y.index_copy_(0, order, out.to(y.dtype))
    state.index_copy_(0, index, s.to(state.dtype))


def _prepare(
    dtype: torch.dtype, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `_advance` takes besides the state, for all tokens [T, H, 64] at once."""
    r, w, k, v, a, b = (x.to(dtype) for x in (r, w, k, v, a, b))
    decay = torch.exp(torch.sigmoid(w).mul_(-DECAY_SCALE))
    writes = torch.stack((b, k), dim=2)
    return decay.unsqueeze(2), torch.stack((a, decay * r), dim=2), writes, (writes * r.unsqueeze(2)).sum(-1), v


def _advance(s: Tensor, decay: Tensor, reads: Tensor, writes: Tensor, weights: Tensor, v: Tensor) -> Tensor:
    """S = S diag(decay) + (S a) b^T + v k^T, in place on s [B, H, value, key]; returns S r [B, H, value].

    decay: [B, H, 1, N]. reads: a and decay * r, [B, H, 2, N]. writes: b and k, [B, H, 2, N]. weights: b r and k r, [B, H, 2].
    The state is read once for both products, as S r of the updated state is S (decay r) + (S a) (b r) + v (k r).
    Reads stand as rows in the products, which torch's CPU kernels do several times faster than as columns.
    """
    flat = s.flatten(0, 1)
    sa, sr = torch.bmm(reads.flatten(0, 1), flat.transpose(1, 2)).unbind(1)
    values = torch.stack((sa, v.flatten(0, 1)), dim=1)
    s.mul_(decay)
    flat.baddbmm_(values.transpose(1, 2), writes.flatten(0, 1))
    return torch.baddbmm(sr.unsqueeze(1), weights.view(-1, 1, 2), values).view(v.shape)


def _compute_dtype(state: Tensor) -> torch.dtype:
    return torch.promote_types(state.dtype, torch.float32)
