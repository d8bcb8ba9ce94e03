"""The whole RWKV-7 model as one plain function over an official state dict: the oracle of the tests.

One sequence, every token in turn, in any floating type; float64 weights give float64 results. Shares no code with
`albatross.models`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from albatross.reference import ops


class State(NamedTuple):
    """What a sequence carries on: wkv [L, H, N value, N key] and shift [L, 2, C] (LN1 and LN2 outputs of the last token)."""

    wkv: Tensor
    shift: Tensor


def zero_state(weights: Mapping[str, Tensor]) -> State:
    num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    num_heads, head_size = weights["blocks.0.att.r_k"].shape
    like = weights["emb.weight"]
    return State(
        like.new_zeros(num_layers, num_heads, head_size, head_size), like.new_zeros(num_layers, 2, num_heads * head_size)
    )


def forward(weights: Mapping[str, Tensor], token_ids: Tensor, state: State) -> tuple[Tensor, State]:
    """Logits [T, V] of every token in token_ids [T], and the state after the last. `state` itself is left alone.

    weights: an official state dict, all in one floating type, which is the type of the results.
    """
    wkv, shift = [], []
    x = ops.layer_norm(weights["emb.weight"][token_ids], weights["blocks.0.ln0.weight"], weights["blocks.0.ln0.bias"])
    v_first = None
    for layer in range(len(state.wkv)):
        p = _block(weights, layer)
        x1 = ops.layer_norm(x, p["ln1.weight"], p["ln1.bias"])
        out, v_first, wkv_after = tmix(p, x1, state.shift[layer, 0], state.wkv[layer], v_first)
        x = x + out
        x2 = ops.layer_norm(x, p["ln2.weight"], p["ln2.bias"])
        x = x + ops.cmix(ops.tokenshift(x2, state.shift[layer, 1], p["ffn.x_k"]), p["ffn.key.weight"], p["ffn.value.weight"])
        wkv.append(wkv_after)
        shift.append(torch.stack((x1[-1], x2[-1])))
    logits = ops.layer_norm(x, weights["ln_out.weight"], weights["ln_out.bias"]) @ weights["head.weight"].T
    return logits, State(torch.stack(wkv), torch.stack(shift))


def tmix(p: Mapping[str, Tensor], x: Tensor, last: Tensor, wkv: Tensor, v_first: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Time mixing of x [T, C] with the weights `p` of one block. Returns its output, layer 0's v, and the state after."""
    xr, xw, xk, xv, xa, xg = (ops.tokenshift(x, last, p[f"att.x_{name}"]) for name in "rwkvag")
    r, k, v = xr @ p["att.receptance.weight"].T, xk @ p["att.key.weight"].T, xv @ p["att.value.weight"].T
    d = ops.decay(p["att.w0"] + torch.tanh(xw @ p["att.w1"]) @ p["att.w2"])
    a = torch.sigmoid(p["att.a0"] + ops.lora(xa, p["att.a1"], p["att.a2"]))
    g = torch.sigmoid(xg @ p["att.g1"]) @ p["att.g2"]
    if v_first is None:
        v_first = v
    else:
        v = v + (v_first - v) * torch.sigmoid(p["att.v0"] + ops.lora(xv, p["att.v1"], p["att.v2"]))
    heads = (len(x), *p["att.r_k"].shape)
    kk = ops.normalise_heads((k * p["att.k_k"]).view(heads))
    k = k * (1 + (a - 1) * p["att.k_a"])
    r, d, k, v, a = (tensor.view(heads) for tensor in (r, d, k, v, a))
    y, wkv = ops.wkv7(wkv, r, d, k, v, -kk, kk * a)
    y = ops.group_norm(y, p["att.ln_x.weight"], p["att.ln_x.bias"]) + ops.bonus(r, k, v, p["att.r_k"])
    return (y * g) @ p["att.output.weight"].T, v_first, wkv


def _block(weights: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The weights of one block by their names within it, vectors as [C]."""
    prefix = f"blocks.{layer}."
    return {
        name.removeprefix(prefix): tensor.flatten() if tensor.dim() == 3 else tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }
