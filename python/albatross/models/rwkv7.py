"""RWKV-7 (x070): weights and the forward pass over packed tokens of many sequences, on the CPU and on CUDA by the same code.

The law stands in `reference/rwkv7.py`. Knows nothing of requests or sampling; the engine's model runner calls it.
The residual stream, layer norms, gates' biases and the recurrence are in float32 whatever the type of the weights.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from albatross import ops
from albatross.config import ModelConfig
from albatross.constants import GROUP_NORM_EPS, HEAD_SIZE, KK_NORM_EPS
from albatross.models.checkpoint import Checkpoint, open_checkpoint
from albatross.models.memory import require_free
from albatross.models.state_pool import StatePool
from albatross.models.weights import Layer, WeightReader
from albatross.reference import wkv7 as reference

# Squared ReLU in float16, whose range plain squares leave at an argument of 255.9: the argument is divided by eight
# first and the output of the value matrix multiplied by 64 in float32. Arguments up to CMIX_BOUND pass (2047 / 8 squared
# is 65472), larger ones are clamped to it; squares below 4e-6 vanish.
CMIX_BOUND = 2047.0
CMIX_SCALE = 0.125
_DTYPES = {"float16": torch.float16, "float32": torch.float32}


class Rows(NamedTuple):
    """Where the rows of one batch lie in the packed tokens, computed once a step and used in every layer."""

    cu_seqlens: Tensor  # [R + 1] int32
    slots: Tensor  # [R] int32, negative for padding
    shift_slots: Tensor  # [R]: rows of the shift pool; the spare one for rows that are padding or empty
    previous: Tensor | None  # [T]: for each token its predecessor in [tokens; rows of the shift state]; None in a decode step
    last: Tensor | None  # [R]: the last token of each row; None in a decode step
    y: Tensor  # [T, H, N]: the recurrence's output, reused by every layer

    def difference(self, x: Tensor, state: Tensor) -> Tensor:
        """Each token's predecessor minus the token itself, [T, C]; `state` [R, C] comes before the rows' first tokens."""
        if self.previous is None:
            return state - x
        return torch.cat((x, state)).index_select(0, self.previous).sub_(x)

    def last_tokens(self, x: Tensor) -> Tensor:
        """The last token of each row, [R, C]."""
        return x if self.last is None else x.index_select(0, self.last)


class RWKV7:
    """A loaded model. `forward` is its one verb; states live in a `StatePool` made by `new_state_pool`."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, state_dtype: torch.dtype, backend: str
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.device = device
        self.dtype = dtype
        self.state_dtype = state_dtype
        self.backend = backend
        self._wkv7 = ops if backend == "native" else reference
        with torch.inference_mode():
            read = WeightReader(checkpoint, device, dtype)
            self._embedding = read.embedding()
            self._layers = [read.layer(index) for index in range(self.config.num_layers)]
            self._ln_out = read.layer_norm("ln_out")
            self._head = read.linear("head")
            checkpoint.check_values()

    def new_state_pool(self, num_slots: int) -> StatePool:
        """States for `num_slots` sequences. Raises ConfigError if they do not fit into the memory that is free."""
        wkv_numel = self.config.num_layers * self.config.hidden_size * HEAD_SIZE
        slot_bytes = wkv_numel * self.state_dtype.itemsize + (self.config.state_numel - wkv_numel) * self.dtype.itemsize
        require_free((num_slots + 1) * slot_bytes, self.device, f"A pool of {num_slots} states", "lower max_num_seqs")
        return StatePool(self.config, num_slots, self.device, self.state_dtype, self.dtype)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, cu_seqlens: Tensor, slots: Tensor, logits_index: Tensor, pool: StatePool, *, is_decode: bool
    ) -> Tensor:
        """Runs packed tokens once through the layers. Returns logits [K, V] float32 of the tokens in `logits_index`.

        token_ids: [T] int64; row i is token_ids[cu_seqlens[i]:cu_seqlens[i + 1]] and continues the state in slots[i].
        cu_seqlens: [R + 1] int32. slots: [R] int32, each at most once; a negative one marks a padding row, which leaves
        no trace. logits_index: [K] int64 into the tokens; may repeat or be empty. is_decode: every row has one token.
        The states of `slots` in `pool` are overwritten. On CUDA with the native backend nothing waits for the device.
        """
        rows = self._locate(token_ids.numel(), cu_seqlens, slots, pool, is_decode)
        states = iter(pool.shift_and_spare.index_select(0, rows.shift_slots).flatten(1, 2).unbind(1))
        shift: list[Tensor] = []
        x = F.embedding(token_ids, self._embedding).float()
        v_first: Tensor | None = None
        for index, layer in enumerate(self._layers):
            x1 = layer.ln1(x).to(self.dtype)
            y, v_first = self._tmix(layer, x1, rows.difference(x1, next(states)), v_first, pool.wkv[:, index], rows)
            _add_product(x, y, layer.output)
            x2 = layer.ln2(x).to(self.dtype)
            hidden = torch.addcmul(x2, rows.difference(x2, next(states)), layer.cmix_mix) @ layer.cmix_key
            add_squared_relu(x, hidden, layer.cmix_value)
            shift += rows.last_tokens(x1), rows.last_tokens(x2)
        pool.shift_and_spare.index_copy_(0, rows.shift_slots, torch.stack(shift, 1).view(-1, *pool.shift.shape[1:]))
        return self._logits(self._ln_out(x.index_select(0, logits_index)))

    def _locate(self, num_tokens: int, cu_seqlens: Tensor, slots: Tensor, pool: StatePool, is_decode: bool) -> Rows:
        y = torch.zeros(num_tokens, self.config.num_heads, HEAD_SIZE, device=self.device, dtype=self.dtype)
        shift_slots = slots.long()
        is_padding = shift_slots < 0
        if is_decode:
            return Rows(cu_seqlens, slots, shift_slots.masked_fill_(is_padding, pool.num_slots), None, None, y)
        bounds = cu_seqlens.long()
        starts, ends = bounds[:-1], bounds[1:]
        tokens = torch.arange(num_tokens, device=self.device)
        row = torch.searchsorted(ends, tokens, right=True).clamp_(max=slots.numel() - 1)
        previous = torch.where(tokens == starts[row], num_tokens + row, tokens - 1).clamp_(min=0)
        shift_slots.masked_fill_(is_padding | (starts == ends), pool.num_slots)
        return Rows(cu_seqlens, slots, shift_slots, previous, (ends - 1).clamp_(min=0), y)

    def _tmix(
        self, layer: Layer, x: Tensor, delta: Tensor, v_first: Tensor | None, wkv: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Time mixing of normalised x [T, C] up to the output matrix. Returns that and layer 0's v for later layers."""
        dtype, heads = self.dtype, (-1, self.config.num_heads, HEAD_SIZE)
        mixed = torch.addcmul(x, delta, layer.mix)
        _, _, xv, xw, xa, xg = mixed.unbind()
        r, k, v = torch.bmm(mixed[:3], layer.rkv).unbind()
        w = layer.w(xw, torch.tanh)
        a = layer.a(xa).sigmoid_()
        g = layer.g(xg, torch.sigmoid)
        if v_first is None or layer.v is None:
            v_first = v
        else:
            v = torch.lerp(v, v_first, layer.v(xv).sigmoid_())
        kk = F.normalize((k * layer.k_k).view(heads), dim=-1, eps=KK_NORM_EPS)
        k = (k * torch.addcmul(layer.one_minus_k_a, a, layer.k_a)).to(dtype)
        r, k, v, w = r.view(heads), k.view(heads), v.view(heads), w.view(heads)
        minus_kk, b = kk.neg().to(dtype), (kk * a.view(heads)).to(dtype)
        if rows.previous is None:
            self._wkv7.wkv7_decode(wkv, r, w, k, v, minus_kk, b, rows.slots, rows.y)
        else:
            self._wkv7.wkv7_prefill(wkv, r, w, k, v, minus_kk, b, rows.cu_seqlens, rows.slots, rows.y)
        y = F.group_norm(rows.y.view(x.shape).float(), heads[1], layer.ln_x.weight, layer.ln_x.bias, GROUP_NORM_EPS)
        bonus = (r * layer.r_k * k).sum(-1, keepdim=True)
        return (torch.addcmul(y.view(heads), bonus, v.float()).view(x.shape) * g).to(dtype), v_first

    def _logits(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if x.is_cuda and x.dtype == torch.float16:
            return torch.mm(x, self._head, out_dtype=torch.float32)
        return (x @ self._head).float()


def _add_product(residual: Tensor, x: Tensor, weight: Tensor, scale: float = 1.0) -> None:
    """Adds scale * x @ weight to the float32 residual in place."""
    if x.dtype == residual.dtype:
        residual.addmm_(x, weight, alpha=scale)
    else:
        residual.add_(x @ weight, alpha=scale)


def add_squared_relu(residual: Tensor, hidden: Tensor, value: Tensor) -> None:
    """Adds the channel mix of `hidden` [T, F], which is overwritten, to the float32 residual [T, C]."""
    if hidden.dtype == torch.float32:
        _add_product(residual, hidden.relu_().square_(), value)
    else:
        _add_product(residual, hidden.clamp_(0, CMIX_BOUND).mul_(CMIX_SCALE).square_(), value, CMIX_SCALE**-2)


def load_model(path: Path, *, device: str, dtype: str, state_dtype: str, backend: str) -> RWKV7:
    """Loads a checkpoint onto `device` ('cpu', 'cuda', 'cuda:N').

    dtype and state_dtype: 'float16' or 'float32'; backend: 'native' or 'reference', who runs the recurrence.

    Raises CheckpointError for a file that is no sound RWKV-7 model, ConfigError if it does not fit into free memory,
    NativeLibraryError if the native library is asked for and cannot be used.
    On CUDA this forbids reduced-precision accumulation in float16 matrix products for the whole process.
    """
    target = torch.device(device)
    if target.type == "cuda":
        target = torch.device("cuda", target.index or 0)
    checkpoint = open_checkpoint(path)
    if target.type == "cuda":
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if backend == "native":
            ops.load_native(target)
    sizes = [tensor.numel() * _DTYPES[dtype].itemsize for tensor in checkpoint.tensors.values()]
    require_free(sum(sizes) + max(sizes), target, f"The model {path}", "free some, or take a smaller model or another device")
    return RWKV7(checkpoint, target, _DTYPES[dtype], _DTYPES[state_dtype], backend)
