"""RWKV-7 (x070): weights and the forward pass over packed tokens of many sequences, on the CPU and on CUDA by the same code.

The law stands in `reference/rwkv7.py`. Knows nothing of requests or sampling; the engine's model runner calls it.
The residual stream is in float32 whatever the type of the weights; what lies between two matrix products is one op.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from albatross import ops, reference
from albatross.config import ModelConfig
from albatross.constants import HEAD_SIZE
from albatross.models.checkpoint import Checkpoint, open_checkpoint
from albatross.models.linear import Linear, LowRank, NativeLinear, Product
from albatross.models.memory import require_free
from albatross.models.state_pool import StatePool
from albatross.models.synth import open_synthetic, synthetic_size
from albatross.models.tuning import load_tuning
from albatross.models.weights import LORAS, MIXES, Layer, WeightReader, padded_rank, padding_numel
from albatross.ops.linear import ROWS_LIMIT

TYPICAL_DENSITY = 0.12  # of the hidden layer of channel mixing: what a trained model's squared ReLU leaves
TUNED_LAYERS = 12  # whose weights a measurement goes through, more than an L2 cache holds
_DTYPES = {"float16": torch.float16, "float32": torch.float32}


class Rows(NamedTuple):
    """Where the rows of one batch lie in the packed tokens, in the order `add_norm_mix` takes it. All int32."""

    cu_seqlens: Tensor  # [R + 1]
    token_rows: Tensor  # [T]: the row of each token; that of the last row for tokens past it
    slots: Tensor  # [R], negative for padding


class Mixed(NamedTuple):
    """The rows of a step with prompts, divided: those of one token at the front, whose token i is row i, and all others."""

    single_slots: Tensor  # [N] int32, negative for the others
    other_slots: Tensor  # [R] int32, negative for the single ones

    @classmethod
    def divide(cls, rows: Rows, num_tokens: int) -> "Mixed":
        bounds, slots = rows.cu_seqlens, rows.slots
        places = torch.arange(len(slots), device=slots.device, dtype=torch.int32)
        is_single = (bounds[:-1] == places) & (bounds[1:] == places + 1)
        front = min(len(slots), num_tokens)
        padding = torch.full_like(slots, -1)
        single, others = torch.where(is_single, slots, padding), torch.where(is_single, padding, slots)
        return cls(single[:front], others)


class Workspace:
    """Every tensor that a forward pass of T tokens writes on its way, allocated once for all layers and never cleared."""

    def __init__(self, config: ModelConfig, num_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        shape = (num_tokens, config.hidden_size)
        rank = padded_rank(max(config.w_rank, config.a_rank, config.g_rank, config.v_rank))
        self.residual = empty(2, *shape, dtype=torch.float32).unbind()  # before and after a sub-block's output was added
        self.delta = empty(*shape)  # a sub-block's output
        self.mixed = empty(len(MIXES), *shape)
        self.mixed_rkv, self.mixed_cmix = self.mixed[:3], self.mixed[:1]
        self.mixes = self.mixed.unbind()
        self.rkv_first, self.rkv = empty(2, 3, *shape).unbind()  # those of layer 0 stay, since all others mix its v in
        self.v_first = self.rkv_first[2]
        self.lora_inputs = self.mixed[MIXES.index(LORAS[0]) :]
        self.lora_hidden = empty(len(LORAS), num_tokens, rank)
        self.loras = empty(len(LORAS), *shape)
        self.cmix_hidden = empty(num_tokens, config.ffn_size)
        self.segments = ops.segment_room(config.num_heads, num_tokens, device)  # of long prompts, for `tmix_prefill`


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
        self._ops = ops if backend == "native" else reference
        self._linear = _choose_linear(device, dtype, backend)
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
        require_free(num_slots * slot_bytes, self.device, f"A pool of {num_slots} states", "lower max_num_seqs")
        return StatePool(self.config, num_slots, self.device, self.state_dtype, self.dtype)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        logits_index: Tensor,
        pool: StatePool,
        *,
        is_decode: bool,
        out: Tensor | None = None,
        normed: Tensor | None = None,
    ) -> Tensor:
        """Runs packed tokens once through the layers. Returns logits [K, V] float32 of the tokens in `logits_index`.

        token_ids: [T] int64; row i is token_ids[cu_seqlens[i]:cu_seqlens[i + 1]] and continues the state in slots[i].
        cu_seqlens: [R + 1] int32. slots: [R] int32, each at most once; a negative one marks a padding row, which leaves
        no trace. logits_index: [K] int64 into the tokens; may repeat or be empty. is_decode: every row has one
        token. out: where the logits go. normed: where what `project` takes goes for every token, [T, C].
        The states of `slots` in `pool` are overwritten. On CUDA with the native backend nothing waits for the device.
        """
        rows = self._locate(len(token_ids), cu_seqlens, slots, is_decode)
        mixed_rows = None if is_decode else Mixed.divide(rows, len(token_ids))
        work = Workspace(self.config, len(token_ids), self.device, self.dtype)
        x, x_next = work.residual
        x.copy_(F.embedding(token_ids, self._embedding))
        delta: Tensor | None = None
        shifts = iter(pool.shift.flatten(1, 2).unbind(1))
        for layer, wkv in zip(self._layers, pool.wkv.unbind(1), strict=True):
            self._ops.add_norm_mix(x, delta, *layer.ln1, layer.mix, next(shifts), *rows, x_next, work.mixed)
            mixed = self._time_mix(layer, wkv, rows, mixed_rows, work)
            self._linear.multiply(Product(mixed, layer.output, work.delta))
            self._ops.add_norm_mix(x_next, work.delta, *layer.ln2, layer.cmix_mix, next(shifts), *rows, x, work.mixed_cmix)
            self._linear.multiply(Product(work.mixes[0], layer.cmix_key, work.cmix_hidden, "squared_relu"))
            self._linear.multiply_value(work.cmix_hidden, layer.cmix_value, work.delta)
            delta = work.delta
        return self._logits(x, work.delta, logits_index, out, normed)

    def new_normed(self, num_tokens: int) -> Tensor:
        """Room for what `forward` leaves for `project`, [T, C] in the model's type."""
        return torch.empty(num_tokens, self.config.hidden_size, device=self.device, dtype=self.dtype)

    @torch.inference_mode()
    def project(self, normed: Tensor, out: Tensor) -> None:
        """Writes the logits [K, V] float32 of tokens whose hidden states `forward` left in its `normed` [K, C]."""
        self._linear.multiply(Product(normed, self._head, out))

    @torch.inference_mode()
    def tune(self, rows: Sequence[int]) -> int:
        """Measures which kernels are the quickest for steps of these numbers of rows on this card, unless that is known.

        Returns how many choices were made; later runs on the same card find them in the user's cache folder.
        """
        few = [number for number in rows if number <= ROWS_LIMIT]
        if not isinstance(self._linear, NativeLinear) or not few:
            return 0
        work = Workspace(self.config, max(few), self.device, self.dtype)
        logits = torch.empty(max(few), self.config.vocab_size, device=self.device)
        work.mixed.normal_()
        work.cmix_hidden.bernoulli_(TYPICAL_DENSITY)
        hidden, layers = torch.empty_like(work.cmix_hidden), self._layers[:TUNED_LAYERS]
        products = [
            [Product(work.mixes[0], layer.output, work.delta) for layer in layers],
            [Product(work.mixes[0], layer.cmix_key, hidden, "squared_relu") for layer in layers],
            [Product(work.mixes[0], self._head, logits)],
        ]
        values = [Product(work.cmix_hidden, layer.cmix_value, work.delta) for layer in layers]
        return self._linear.tune(few, products, values)

    def _locate(self, num_tokens: int, cu_seqlens: Tensor, slots: Tensor, is_decode: bool) -> Rows:
        tokens = torch.arange(num_tokens, device=self.device, dtype=torch.int32)
        if is_decode:
            return Rows(cu_seqlens, tokens, slots)
        token_rows = torch.searchsorted(cu_seqlens[1:], tokens, right=True, out_int32=True)
        return Rows(cu_seqlens, token_rows.clamp_(max=len(slots) - 1), slots)

    def _time_mix(self, layer: Layer, state: Tensor, rows: Rows, mixed_rows: Mixed | None, work: Workspace) -> Tensor:
        """Time mixing of `work.mixed` up to the output matrix, [T, C]; advances the rows' states in `state` [S, H, N, N].

        mixed_rows is None where every row has one token. What tokens of no row get has no meaning.
        """
        rkv = work.rkv_first if layer.v0 is None else work.rkv
        self._project(layer, work, rkv)
        out = work.mixes[0]  # the mixed inputs are multiplied by now
        singles = rows.slots if mixed_rows is None else mixed_rows.single_slots
        front = slice(len(singles))
        self._ops.tmix_decode(state, *_time_mix_inputs(layer, work, rkv, front), singles, out[front])
        if mixed_rows is not None:  # those it wrote zeros for
            inputs = _time_mix_inputs(layer, work, rkv, slice(None))
            self._ops.tmix_prefill(state, *inputs, rows.cu_seqlens, mixed_rows.other_slots, out, work.segments)
        return out

    def _project(self, layer: Layer, work: Workspace, rkv: Tensor) -> None:
        """Time mixing's products: `work.mixed` into `rkv` [3, T, C] and `work.loras`."""
        self._linear.project(Product(work.mixed_rkv, layer.rkv, rkv), _low_rank(layer, work))

    def _logits(self, x: Tensor, delta: Tensor, index: Tensor, out: Tensor | None, normed: Tensor | None) -> Tensor:
        logits = torch.empty(len(index), self.config.vocab_size, device=self.device) if out is None else out
        if normed is None:
            chosen = self.new_normed(len(index))
            self._ops.add_norm(x, delta, *self._ln_out, index, chosen)
        else:
            self._ops.add_norm(x, delta, *self._ln_out, torch.arange(len(x), device=self.device), normed)
            chosen = normed.index_select(0, index)
        self.project(chosen, logits)
        return logits


def _time_mix_inputs(layer: Layer, work: Workspace, rkv: Tensor, tokens: slice) -> tuple[Tensor | None, ...]:
    """What `tmix_decode` and `tmix_prefill` take of these tokens, from r to ln_bias."""
    r, k, v = rkv[:, tokens].unbind()
    v_gate, w, a, g = work.loras[:, tokens].unbind()
    gate = (v_gate, work.v_first[tokens]) if layer.v0 is not None else (None, None)
    return r, k, v, w, a, gate[0], g, gate[1], layer.w0, layer.a0, layer.v0, layer.k_k, layer.k_a, layer.r_k, *layer.ln_x


def _low_rank(layer: Layer, work: Workspace) -> LowRank:
    down, up, ranks, activations = layer.loras
    own = slice(len(LORAS) - len(ranks), None)  # layer 0 has no v
    rank = down.shape[1]
    return LowRank(
        work.lora_inputs[own], down, work.lora_hidden[own, :, :rank], up, work.loras[own], ranks, activations
    )


def _choose_linear(device: torch.device, dtype: torch.dtype, backend: str) -> Linear:
    if device.type != "cuda" or dtype != torch.float16 or backend != "native":
        return Linear()
    digest = ops.load_native(device).build.sha256
    return NativeLinear(
        device, load_tuning(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), digest)
    )


def load_model(path: Path, *, device: str, dtype: str, state_dtype: str, backend: str) -> RWKV7:
    """Loads a checkpoint onto `device` ('cpu', 'cuda', 'cuda:N'), or makes random weights there for the path "synth:SIZE".

    dtype and state_dtype: 'float16' or 'float32'; backend: 'native' or 'reference', who runs all but the products.

    Raises CheckpointError for a file that is no sound RWKV-7 model, ConfigError if it does not fit into free memory,
    NativeLibraryError if the native library is asked for and cannot be used.
    On CUDA this forbids reduced-precision accumulation in float16 matrix products for the whole process.
    """
    target = torch.device(device)
    if target.type == "cuda":
        target = torch.device("cuda", target.index or 0)
    size = synthetic_size(path)
    checkpoint = open_checkpoint(path) if size is None else open_synthetic(size)
    if target.type == "cuda":
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if backend == "native":
            ops.load_native(target)
    sizes = [tensor.numel() for tensor in checkpoint.tensors.values()]
    needed = (sum(sizes) + max(sizes) + padding_numel(checkpoint.config)) * _DTYPES[dtype].itemsize
    require_free(needed, target, f"The model {path}", "free some, or take a smaller model or another device")
    return RWKV7(checkpoint, target, _DTYPES[dtype], _DTYPES[state_dtype], backend)
