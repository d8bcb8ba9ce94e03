"""What the engine remembers of a request: one prompt (`Request`) and its choices (`Stream`). No torch, no text.

A request reads its prompt once, in the slot of its first stream, and forks the state to the others. What a stream drew
last is known to the device alone; the host knows how many tokens it has asked for, and how many it has seen.
"""

import os
from array import array
from dataclasses import dataclass, field

from albatross.constants import END_OF_TEXT_ID
from albatross.engine.messages import AddRequest, unpack_ids
from albatross.errors import InvalidRequestError
from albatross.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Stream:
    """One choice: where its state lives (-1: nowhere), how many tokens are drawn or on their way, and how many have come."""

    stream_id: int
    choice: int
    slot: int = -1
    num_scheduled: int = 0
    num_generated: int = 0
    rested_at: int = -(1 << 30)  # number of the step that it sat out last
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its streams. `limit` is the number of tokens after which a stream ends with reason "length"."""

    streams: list[Stream]
    prompt: "array[int]"
    params: SamplingParams
    seed: int
    limit: int
    priority: int
    num_prefilled: int = 0
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    is_admitted: bool = False
    arrival: int = 0  # number among all requests

    @classmethod
    def from_message(cls, message: AddRequest, max_output_tokens: int) -> "Request":
        """Raises InvalidRequestError for a prompt without a token, which no step could read."""
        if not message.prompt:
            raise InvalidRequestError("A prompt must have at least one token, but this one is empty.", "prompt")
        params = message.params
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        eos = () if params.ignore_eos else (END_OF_TEXT_ID,)
        return cls(
            streams=[Stream(stream_id, choice) for choice, stream_id in enumerate(message.stream_ids)],
            prompt=unpack_ids(message.prompt),
            params=params,
            seed=seed % 2**64,
            limit=max_output_tokens if params.max_tokens is None else min(params.max_tokens, max_output_tokens),
            priority=message.priority,
            stop_ids=frozenset((*params.stop_token_ids, *eos)),
        )

    @property
    def living(self) -> list[Stream]:
        return [stream for stream in self.streams if not stream.is_finished]

    def targets(self, start: int, length: int) -> "array[int]":
        """The tokens that `length` of the prompt from `start` on are scored against, each its successor; the prompt's last has
        none. Empty for a request that does not ask."""
        is_scored = self.params.prompt_logprobs is not None
        return self.prompt[start + 1 : start + length + 1] if is_scored else array("I")

    @property
    def num_unread(self) -> int:
        """Prompt tokens that no step has taken yet."""
        return len(self.prompt) - self.num_prefilled
