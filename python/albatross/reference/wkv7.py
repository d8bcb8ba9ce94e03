"""The WKV-7 recurrence in plain torch: the meaning of the native op over sequences, and its CPU implementation.

Same names and arguments as `albatross.ops`, on any device and in any floating type; arithmetic is in float32, or in
float64 where the state is. Knows nothing of the op registry and checks nothing: `ops/wkv7.py` does both.
"""

import torch
from torch import Tensor

from albatross.constants import DECAY_SCALE, HEAD_SIZE


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

    state: [S, H, 64 value, 64 key], changed in place, rounded to its type once, after a row's last token.
    r, w, k, v, a, b: [T, H, 64], packed. cu_seqlens: [R + 1]. slots: [R]; a negative one is padding. y: [T, H, 64], written
    in place. Rows of padding slots and of no tokens change nothing. Law: see `advance`, with exp(-DECAY_SCALE * sigmoid(w)).
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
    r, w, k, v, a, b = (x.index_select(0, order).to(s.dtype) for x in (r, w, k, v, a, b))
    inputs = prepare(r, w.sigmoid_().mul_(-DECAY_SCALE).exp_(), k, v, a, b)
    num_heads, heads = s.shape[1], s.flatten(0, 1)
    out = s.new_empty(order.shape[0] * num_heads, 1, HEAD_SIZE)
    begin = 0
    for n in num_running:
        end = begin + n * num_heads
        out[begin:end] = advance(heads[: n * num_heads], *(x[begin:end] for x in inputs))
        begin = end
    y.index_copy_(0, order, out.to(y.dtype).view(-1, *y.shape[1:]))
    state.index_copy_(0, index, s.to(state.dtype))


def prepare(
    r: Tensor, decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `advance` takes besides the state, for all tokens [T, H, 64] at once; all in the state's compute type."""
    row = (-1, 1, HEAD_SIZE)
    return r.reshape(row), decay.reshape(row), v.reshape(row), a.reshape(row), torch.stack((b, k), dim=2).flatten(0, 1)


def advance(s: Tensor, r: Tensor, decay: Tensor, v: Tensor, a: Tensor, writes: Tensor) -> Tensor:
    """S = S diag(decay) + (S a) b^T + v k^T, in place on s [B, value, key]; returns S r [B, 1, value].

    B is any number of heads. r, decay, v, a: [B, 1, N]. writes: b and k, [B, 2, N].
    All stand as rows in the products, which torch's CPU kernels do several times faster than as columns.
    """
    columns = s.transpose(1, 2)
    values = torch.cat((torch.bmm(a, columns), v), dim=1)
    s.mul_(decay).baddbmm_(values.transpose(1, 2), writes)
    return torch.bmm(r, columns)


def _compute_dtype(state: Tensor) -> torch.dtype:
    return torch.promote_types(state.dtype, torch.float32)
