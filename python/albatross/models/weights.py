"""The weights of RWKV-7 as the forward pass wants them: stacked, transposed and folded once, while a checkpoint is read.

Knows the names of an official state dict and the layout `rwkv7.RWKV7` computes with; nothing of batches or states.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from albatross.constants import HEAD_SIZE, LAYER_NORM_EPS
from albatross.models.checkpoint import Checkpoint

_FOLDED_ROWS = 4096  # rows of the embedding normalised at a time, which bounds the float32 copy


@dataclass(slots=True)
class LayerNorm:
    """Weight and bias [C], float32."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)


@dataclass(slots=True)
class Lora:
    """A low-rank projection: down [C, rank], up [rank, C] and, where the law has one, bias [C]."""

    down: Tensor
    up: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        hidden = x @ self.down
        if activation is not None:
            hidden = activation(hidden)
        return hidden @ self.up if self.bias is None else torch.addmm(self.bias, hidden, self.up)


@dataclass(slots=True)
class Layer:
    """Weights of one block. Matrices are [in, out] in the model's type, as are mixes and LoRAs; scales are [C] in float32."""

    ln1: LayerNorm
    ln2: LayerNorm
    mix: Tensor  # [6, 1, C]: how much of the shift goes into r k v w a g
    rkv: Tensor  # [3, C, C]
    w: Lora
    a: Lora
    v: Lora | None  # None in layer 0
    g: Lora
    k_k: Tensor
    k_a: Tensor
    one_minus_k_a: Tensor
    r_k: Tensor  # [H, N]
    ln_x: LayerNorm
    output: Tensor
    cmix_mix: Tensor  # [C]
    cmix_key: Tensor
    cmix_value: Tensor


class WeightReader:
    """Takes the tensors of a checkpoint and puts them together as the forward pass wants them."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype

    def matrix(self, name: str) -> Tensor:
        return self._checkpoint.take(name, self._device, self._dtype)

    def linear(self, name: str) -> Tensor:
        """A matrix stored [out, in], as [in, out]."""
        return self.matrix(f"{name}.weight").t().contiguous()

    def row(self, name: str) -> Tensor:
        return self.matrix(name).flatten()

    def scale(self, name: str) -> Tensor:
        return self._checkpoint.take(name, self._device, torch.float32).flatten()

    def layer_norm(self, name: str) -> LayerNorm:
        return LayerNorm(self.scale(f"{name}.weight"), self.scale(f"{name}.bias"))

    def lora(self, name: str, *, has_bias: bool = True) -> Lora:
        return Lora(self.matrix(f"{name}1"), self.matrix(f"{name}2"), self.row(f"{name}0") if has_bias else None)

    def embedding(self) -> Tensor:
        """The embedding table with ln0 folded in, [V, C]; normalised in float32, a part of the rows at a time."""
        raw = self._checkpoint.take("emb.weight", self._device, self._checkpoint.tensors["emb.weight"].dtype)
        ln0 = self.layer_norm("blocks.0.ln0")
        table = torch.empty_like(raw, dtype=self._dtype)
        for start in range(0, len(raw), _FOLDED_ROWS):
            table[start : start + _FOLDED_ROWS] = ln0(raw[start : start + _FOLDED_ROWS].float())
        self._checkpoint.note("emb.weight after ln0", table, self._dtype)
        return table

    def layer(self, index: int) -> Layer:
        block = f"blocks.{index}"
        att, ffn = f"{block}.att", f"{block}.ffn"
        k_a = self.scale(f"{att}.k_a")
        return Layer(
            ln1=self.layer_norm(f"{block}.ln1"),
            ln2=self.layer_norm(f"{block}.ln2"),
            mix=torch.stack([self.row(f"{att}.x_{name}") for name in "rkvwag"]).unsqueeze(1),
            rkv=torch.stack([self.linear(f"{att}.{name}") for name in ("receptance", "key", "value")]),
            w=self.lora(f"{att}.w"),
            a=self.lora(f"{att}.a"),
            v=self.lora(f"{att}.v") if index else None,
            g=self.lora(f"{att}.g", has_bias=False),
            k_k=self.scale(f"{att}.k_k"),
            k_a=k_a,
            one_minus_k_a=1 - k_a,
            r_k=self.scale(f"{att}.r_k").view(-1, HEAD_SIZE),
            ln_x=self.layer_norm(f"{att}.ln_x"),
            output=self.linear(f"{att}.output"),
            cmix_mix=self.row(f"{ffn}.x_k"),
            cmix_key=self.linear(f"{ffn}.key"),
            cmix_value=self.linear(f"{ffn}.value"),
        )
