"""How a step's rows lie one behind the other in one batch of tokens, and how a batch is padded to a size that was captured.

Knows nothing of devices. `model_runner` packs every step that has prompts; `graphs` pads it.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from albatross.engine.scheduler import Step

PADDING_SLOT = -1


class Packed(NamedTuple):
    """The decoding rows of a step, one token each, and behind them its chunks.

    A token that is not negative is a prompt's id; -1 - s stands for what slot s drew last, which only the device knows.
    """

    tokens: "array[int]"  # [T], of type "i"
    bounds: Sequence[int]  # [R + 1]: row i has the tokens bounds[i] to bounds[i + 1]
    slots: Sequence[int]  # [R], each at most once
    logits_index: Sequence[int]  # [K] into the tokens; a chunk with several choices is there several times
    draws: Sequence[int]  # [K]: the slots that draw

    def padded(self, num_tokens: int, num_rows: int) -> "Packed":
        """The same for `num_tokens` tokens, of `num_rows` rows and draws: what is added leaves no trace."""
        rows, draws = num_rows - len(self.slots), num_rows - len(self.draws)
        return Packed(
            self.tokens + array("i", bytes(4 * (num_tokens - len(self.tokens)))),
            [*self.bounds, *[self.bounds[-1]] * rows],
            [*self.slots, *[PADDING_SLOT] * rows],
            [*self.logits_index, *[0] * draws],
            [*self.draws, *[PADDING_SLOT] * draws],
        )


NOTHING = Packed(array("i"), (0,), (), (), ())


def pack(step: Step) -> Packed:
    draws = [stream.slot for stream, _ in step.draws]
    decoding = draws[: step.num_decoding]
    tokens = array("i", [-1 - slot for slot in decoding])
    bounds, logits_index = list(range(len(decoding) + 1)), list(range(len(decoding)))
    for chunk in step.chunks:
        tokens.frombytes(chunk.tokens.tobytes())  # unsigned there; no id needs the bit that makes the difference
        bounds.append(len(tokens))
        logits_index += [len(tokens) - 1] * len(chunk.samples)
    return Packed(tokens, bounds, decoding + [chunk.slot for chunk in step.chunks], logits_index, draws)
