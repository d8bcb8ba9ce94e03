"""What a step must move and compute at least, by arithmetic from a model's sizes.

Knows no device and no time: the benchmarks divide by what they measured a card to do.
"""

from dataclasses import dataclass

from albatross.config import ModelConfig
from albatross.constants import HEAD_SIZE


@dataclass(frozen=True)
class StepCost:
    """Of one step. `weight_bytes`: every matrix once, of the embedding only the rows drawn. `state_bytes`: every state in and
    out. `flops`: matrix products alone, since the recurrence takes a few percent of them and no tensor cores."""

    weight_bytes: int
    state_bytes: int
    flops: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes

    def seconds(self, bandwidth: float, gemm_rate: float) -> float:
        """The least time on a card of these bytes and operations a second, if both overlap perfectly."""
        return max(self.num_bytes / bandwidth, self.flops / gemm_rate)

    def limit(self, bandwidth: float, gemm_rate: float) -> str:
        """Which of the two decides."""
        return "bandwidth" if self.num_bytes / bandwidth >= self.flops / gemm_rate else "compute"


def step_cost(
    config: ModelConfig, num_rows: int, slot_bytes: int, itemsize: int = 2, num_tokens: int | None = None
) -> StepCost:
    """A step of `num_rows` sequences with weights of `itemsize` bytes a number and logits for each sequence's last token.

    num_tokens: of all sequences; without it each has one, as in decoding. All weights are counted, the sparse ones too: a
    step that skips the zero rows of a squared ReLU may take less than the bound.
    """
    num_tokens = num_rows if num_tokens is None else num_tokens
    width = config.hidden_size
    ranks = config.w_rank + config.a_rank + config.v_rank + config.g_rank
    layer = width * (4 * width + 2 * config.ffn_size + 2 * ranks)
    layers = config.num_layers * layer - 2 * width * config.v_rank  # layer 0 has no v LoRA
    head = width * config.vocab_size
    return StepCost(
        weight_bytes=(layers + head + num_tokens * width) * itemsize,
        state_bytes=2 * num_rows * slot_bytes,
        flops=2 * (num_tokens * layers + num_rows * head),
    )


def recurrence_bytes(
    num_rows: int, num_tokens: int, num_heads: int, state_itemsize: int, itemsize: int = 2, num_vectors: int = 7
) -> int:
    """What one layer's recurrence moves over sequences of `num_tokens` in all: states in and out, and so many vectors a token:
    r, w, k, v, a, b and y."""
    return num_heads * HEAD_SIZE * (2 * num_rows * HEAD_SIZE * state_itemsize + num_vectors * num_tokens * itemsize)
