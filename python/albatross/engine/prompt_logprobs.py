"""Log-probabilities of a prompt's tokens at the front: kept as the packed columns they come in, looked at token by token.

One object a prompt, shared by its choices. Filled through `output_processor`, read by the server and by `LLM`.
"""

from array import array
from collections.abc import Sequence
from typing import overload

from albatross.engine.messages import ScoreColumns, TokenLogprobs


class PromptTokenLogprobs(TokenLogprobs, frozen=True):
    """As `TokenLogprobs`, of one token of a prompt. rank: 1 for the likeliest in its place."""

    rank: int


class PromptLogprobs(Sequence["PromptTokenLogprobs | None"]):
    """Parallel to the prompt's ids: None for the first, before which there is nothing, then one entry for each that has come."""

    def __init__(self) -> None:
        self._logprobs, self._top_logprobs = array("f"), array("f")
        self._ranks, self._top_ids = array("I"), array("I")

    def extend(self, columns: ScoreColumns) -> None:
        self._logprobs.frombytes(columns.logprobs)
        self._ranks.frombytes(columns.ranks)
        self._top_ids.frombytes(columns.top_ids)
        self._top_logprobs.frombytes(columns.top_logprobs)

    def __len__(self) -> int:
        return len(self._logprobs) + 1

    @overload
    def __getitem__(self, place: int) -> PromptTokenLogprobs | None: ...

    @overload
    def __getitem__(self, place: slice) -> list[PromptTokenLogprobs | None]: ...

    def __getitem__(self, place: int | slice) -> PromptTokenLogprobs | list[PromptTokenLogprobs | None] | None:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        row = range(len(self))[place] - 1
        if row < 0:
            return None
        num_top = len(self._top_ids) // len(self._logprobs)
        top = slice(row * num_top, (row + 1) * num_top)
        return PromptTokenLogprobs(
            self._logprobs[row], tuple(self._top_ids[top]), tuple(self._top_logprobs[top]), self._ranks[row]
        )
