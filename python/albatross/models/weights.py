"""The weights of RWKV-7 as the forward pass wants them: stacked, padded and folded once, while a checkpoint is read.

Knows the names of an official state dict and the layout `rwkv7.RWKV7` computes with; nothing of batches or states.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from albatross.config import ModelConfig
from albatross.constants import HEAD_SIZE, LAYER_NORM_EPS
from albatross.models.checkpoint import Checkpoint
from albatross.models.linear import Activation

MIXES = "rkvwag"  # what each of a token's six mixed inputs is for
LORAS = "vwag"  # the low-rank projections, in the order of their inputs, which stand one behind another among MIXES
_ACTIVATIONS: dict[str, Activation] = {"v": "none", "w": "tanh", "a": "none", "g": "sigmoid"}  # what follows the first matrix
_RANK_MULTIPLE = 8  # float16 numbers in 16 bytes, at which products want their rows aligned
_FOLDED_ROWS = 4096  # rows of the embedding normalised at a time, which bounds the float32 copy


class LayerNorm(NamedTuple):
    """Weight and bias [C], float32."""

    weight: Tensor
    bias: Tensor


class Loras(NamedTuple):
    """The low-rank projections of a layer: n = 4 of LORAS, in layer 0 the last 3. Ranks are padded with zeros to the largest."""

    down: Tensor  # [n, R, C]
    up: Tensor  # [n, C, R]
    ranks: list[int]  # padded to whole 16 bytes only
    activations: list[Activation]


@dataclass(slots=True)
class Layer:
    """Weights of one block. Matrices are [out, in] in the model's type, as are mixes; scales and biases are [C] in float32."""

    ln1: LayerNorm
    ln2: LayerNorm
    mix: Tensor  # [6, C]: how much of the shift goes into each of MIXES
    rkv: Tensor  # [3, C, C]
    loras: Loras
    w0: Tensor
    a0: Tensor
    v0: Tensor | None  # None in layer 0
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor  # [H, N]
    ln_x: LayerNorm
    output: Tensor
    cmix_mix: Tensor  # [1, C]
    cmix_key: Tensor
    cmix_value: Tensor  # [F, C], [in, out]: a row that meets a zero of the hidden layer need not be read


def padded_rank(rank: int) -> int:
    return -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE


def padding_numel(config: ModelConfig) -> int:
    """Numbers that all low-rank matrices together hold beyond those of the checkpoint."""
    ranks = [padded_rank(rank) for rank in (config.w_rank, config.a_rank, config.v_rank, config.g_rank)]
    return 2 * config.hidden_size * config.num_layers * sum(max(ranks) - rank for rank in ranks)


class WeightReader:
    """Takes the tensors of a checkpoint and puts them together as the forward pass wants them."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype

    def matrix(self, name: str) -> Tensor:
        return self._checkpoint.take(name, self._device, self._dtype)

    def linear(self, name: str) -> Tensor:
        return self._lay_out(self.matrix(f"{name}.weight"))

    def scale(self, name: str) -> Tensor:
        return self._checkpoint.take(name, self._device, torch.float32).flatten()

    def layer_norm(self, name: str) -> LayerNorm:
        return LayerNorm(self.scale(f"{name}.weight"), self.scale(f"{name}.bias"))

    def loras(self, att: str, names: str) -> Loras:
        downs = [self.matrix(f"{att}.{name}1").t() for name in names]
        ups = [self.matrix(f"{att}.{name}2").t() for name in names]
        ranks = [padded_rank(len(down)) for down in downs]
        down = torch.stack([F.pad(down, (0, 0, 0, max(ranks) - len(down))) for down in downs])
        up = torch.stack([F.pad(up, (0, max(ranks) - up.shape[1])) for up in ups])
        return Loras(self._lay_out(down), self._lay_out(up), ranks, [_ACTIVATIONS[name] for name in names])

    def embedding(self) -> Tensor:
        """The embedding table with ln0 folded in, [V, C]; normalised in float32, a part of the rows at a time."""
        raw = self._checkpoint.take("emb.weight", self._device, self._checkpoint.tensors["emb.weight"].dtype)
        weight, bias = self.layer_norm("blocks.0.ln0")
        table = torch.empty_like(raw, dtype=self._dtype)
        for start in range(0, len(raw), _FOLDED_ROWS):
            rows = raw[start : start + _FOLDED_ROWS].float()
            table[start : start + _FOLDED_ROWS] = F.layer_norm(rows, weight.shape, weight, bias, LAYER_NORM_EPS)
        self._checkpoint.note("emb.weight after ln0", table, self._dtype)
        return table

    def layer(self, index: int) -> Layer:
        block = f"blocks.{index}"
        att, ffn = f"{block}.att", f"{block}.ffn"
        return Layer(
            ln1=self.layer_norm(f"{block}.ln1"),
            ln2=self.layer_norm(f"{block}.ln2"),
            mix=torch.stack([self.matrix(f"{att}.x_{name}").flatten() for name in MIXES]),
            rkv=self._lay_out(torch.stack([self.matrix(f"{att}.{name}.weight") for name in ("receptance", "key", "value")])),
            loras=self.loras(att, LORAS if index else LORAS[1:]),
            w0=self.scale(f"{att}.w0"),
            a0=self.scale(f"{att}.a0"),
            v0=self.scale(f"{att}.v0") if index else None,
            k_k=self.scale(f"{att}.k_k"),
            k_a=self.scale(f"{att}.k_a"),
            r_k=self.scale(f"{att}.r_k").view(-1, HEAD_SIZE),
            ln_x=self.layer_norm(f"{att}.ln_x"),
            output=self.linear(f"{att}.output"),
            cmix_mix=self.matrix(f"{ffn}.x_k").view(1, -1),
            cmix_key=self.linear(f"{ffn}.key"),
            cmix_value=self.matrix(f"{ffn}.value.weight").t().contiguous(),
        )

    def _lay_out(self, weight: Tensor) -> Tensor:
        """`weight` [..., out, in], contiguous; on the CPU with the memory of [..., in, out], which its products read faster."""
        return weight if self._device.type == "cuda" else weight.mT.contiguous().mT
