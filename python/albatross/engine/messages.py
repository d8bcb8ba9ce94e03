"""The whole boundary between a front process and an engine process: frozen structs, msgpack over ZeroMQ.

A stream is one choice of one request; its id is a number the front chose, unique while the front lives. Nothing but
these structs crosses, and nothing here knows text: prompts go down as token ids, answers come back as token ids.
"""

import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from albatross.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; array-like and tagged, so that one decoder takes any of them."""


class AddRequest(Message, frozen=True):
    """Start `len(stream_ids)` choices of one prompt. Choice i is stream_ids[i]; its random numbers come from (seed, i)."""

    stream_ids: tuple[int, ...]
    prompt: bytes  # token ids as uint32
    params: SamplingParams
    priority: int = 0  # lower runs earlier; equal values run in order of arrival


class AbortRequest(Message, frozen=True):
    """Stop these streams; unknown and finished ids are no error."""

    stream_ids: tuple[int, ...]


class Shutdown(Message, frozen=True):
    """Leave after the current step."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one drawn token under the raw logits, and of the highest ones, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class ScoreColumns(msgspec.Struct, frozen=True, array_like=True):
    """What the model expected of T consecutive tokens of a prompt, under the raw logits, in packed numbers."""

    logprobs: bytes  # [T] float32, of the tokens themselves
    ranks: bytes  # [T] uint32, 1 for the likeliest
    top_ids: bytes  # [T, N] uint32, best first
    top_logprobs: bytes  # [T, N] float32


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """A piece of what a prompt's choices asked for. The pieces come in order and begin with the prompt's second token, the first
    that something stands before; all have come with the message that brings the first drawn token, or the end."""

    stream_ids: tuple[int, ...]  # the choices that have not ended
    columns: ScoreColumns


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The end of one stream. stop_token_id is the id that ended it (not counted as text), if one did."""

    stream_id: int
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of one moment, for /metrics and for admission."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0  # total since start
    generated_tokens: int = 0  # total since start
    discarded_tokens: int = 0  # total since start: drawn for streams that had ended, which running ahead costs
    step_ms: float = 0.0  # time of the last step


class StepOutput(Message, frozen=True):
    """All that one step made: a column of stream ids, the same number of drawn tokens, and the streams that ended.

    A token that ends a stream (end of text, a stop id) stands in the columns as well as in its Finish.
    `logprobs` maps positions in the columns to values, for the streams that asked for them. `scores` belong to the prompts that
    the step read, before anything was drawn from them.
    """

    stream_ids: bytes  # uint32
    token_ids: bytes  # uint32
    finished: tuple[Finish, ...] = ()
    logprobs: dict[int, TokenLogprobs] = {}
    stats: EngineStats = EngineStats()
    scores: tuple[PromptScores, ...] = ()


class EngineReady(Message, frozen=True):
    """The model is loaded and the engine takes requests."""

    model_name: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    device: str
    dtype: str
    state_dtype: str
    backend: str
    num_slots: int
    state_bytes: int  # of one slot
    load_s: float


class EngineFailed(Message, frozen=True):
    """The engine could not start or cannot go on; the process ends after this. `kind` is the error's class name."""

    kind: str
    message: str


class Heartbeat(Message, frozen=True):
    """A sign of life while there is nothing to do."""

    stats: EngineStats


ToEngine = AddRequest | AbortRequest | Shutdown
FromEngine = StepOutput | EngineReady | EngineFailed | Heartbeat


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What an engine process sends: `epoch` tells a restarted engine's messages from those of the one before it."""

    epoch: int
    message: FromEngine


def pack_ids(ids: Iterable[int]) -> bytes:
    return array.array("I", ids).tobytes()


def unpack_ids(data: bytes) -> "array.array[int]":
    ids: array.array[int] = array.array("I")
    ids.frombytes(data)
    return ids
