"""The front's side of the engine: takes prompts as ids, gives back choices that fill as the engine steps.

Admission is decided here, at once: a request beyond slots and queue is refused before it is sent. One message a step
carries all tokens; they are appended to each choice's list and its generation is woken once. Used by the server.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from albatross.config import EngineConfig
from albatross.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    EngineStats,
    Finish,
    FromEngine,
    StepOutput,
    TokenLogprobs,
    pack_ids,
    unpack_ids,
)
from albatross.engine.output_processor import Choice, Delta
from albatross.engine.supervisor import ENGINE_COMMAND, EngineStatus, Supervisor
from albatross.errors import EngineDeadError, InvalidRequestError, QueueFullError
from albatross.sampling_params import SamplingParams
from albatross.tokenizer.world import WorldTokenizer

# All that the server needs of the engine, so that it imports no other module of it.
__all__ = [
    "Choice",
    "Delta",
    "EngineClient",
    "EngineReady",
    "EngineStats",
    "EngineStatus",
    "Generation",
    "TokenLogprobs",
    "check_prompt",
]

_RETRY_AFTER_S = (1.0, 60.0)  # least and most that a refused client is told to wait
_REMEMBERED_ENDS = 64  # over which the rate of ending streams is taken


class Generation:
    """All choices of one call of `generate`. Leaving its `with` block aborts what still runs."""

    def __init__(self, client: "EngineClient", prompt_tokens: int) -> None:
        self.choices: list[Choice] = []
        self.prompt_tokens = prompt_tokens
        self._client = client
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    async def wait(self) -> None:
        """Returns when a choice has something to take, has ended, or `wake` was called since the last wait."""
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_news = False

    def wake(self) -> None:
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """Stops every choice that still runs; they end with reason "abort"."""
        self._client.abort([choice.stream_id for choice in self.choices])

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()


class EngineClient:
    """One engine process and the requests in it. All methods run on one event loop."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.config = config
        self._supervisor = Supervisor(config, self._on_message, self._on_death, command)
        self._stream_ids = itertools.count(1)
        self._streams: dict[int, Choice] = {}
        self._unread_tokens: dict[int, int] = {}  # first stream of a prompt -> its length, until its first token comes
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)
        self._tokenizer: WorldTokenizer | None = None

    @classmethod
    async def start(cls, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> "EngineClient":
        """Starts the engine process and returns at once; see `wait_ready`. `command` replaces the engine in benchmarks."""
        client = cls(config, command)
        client._supervisor.start()
        return client

    async def wait_ready(self) -> EngineReady:
        """Raises what kept the engine from starting: CheckpointError, NativeLibraryError, ConfigError, ..."""
        return await self._supervisor.wait_ready()

    @property
    def status(self) -> EngineStatus:
        return self._supervisor.status

    @property
    def tokenizer(self) -> WorldTokenizer:
        """Raises EngineDeadError before the first engine is ready."""
        if self._tokenizer is None:
            raise EngineDeadError(f"The engine is not ready: {self.status.reason}.")
        return self._tokenizer

    async def close(self) -> None:
        self._on_death("the server is shutting down")
        await self._supervisor.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        priority: int = 0,
    ) -> Generation:
        """Starts n choices of each prompt; choice i of prompt p has index p * n + i.

        Raises InvalidRequestError, QueueFullError, or EngineDeadError, and has then started nothing.
        """
        tokenizer = self.tokenizer
        self._check(prompts, params, n, tokenizer)
        self._check_room(len(prompts) * n, sum(map(len, prompts)))
        generation = Generation(self, sum(map(len, prompts)))
        for number, prompt in enumerate(prompts):
            stream_ids = tuple(itertools.islice(self._stream_ids, n))
            for i, stream_id in enumerate(stream_ids):
                choice = Choice(
                    number * n + i, stream_id, tokenizer,
                    stop=stop, include_stop=include_stop, min_tokens=params.min_tokens,
                    wants_logprobs=params.logprobs is not None, wake=generation.wake, abort=self._abort_one,
                )  # fmt: skip
                generation.choices.append(choice)
                self._streams[stream_id] = choice
            self._unread_tokens[stream_ids[0]] = len(prompt)
            try:
                self._supervisor.send(AddRequest(stream_ids, pack_ids(prompt), params, priority))
            except EngineDeadError:
                generation.abort()
                raise
        return generation

    def abort(self, stream_ids: Sequence[int]) -> None:
        """Ends these streams here and in the engine; finished and unknown ones are passed over."""
        running = tuple(stream_id for stream_id in stream_ids if stream_id in self._streams)
        if not running:
            return
        for stream_id in running:
            self._end_stream(Finish(stream_id, "abort"))
        with contextlib.suppress(EngineDeadError):  # an engine that is gone, noticed or not, has nothing left to stop
            self._supervisor.send(AbortRequest(running))

    def _abort_one(self, stream_id: int) -> None:
        self.abort((stream_id,))

    def _check(self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, tokenizer: WorldTokenizer) -> None:
        limits = self.config
        if n < 1:
            raise InvalidRequestError(f"n must be at least 1, but is {n}.", "n")
        if n > limits.max_num_seqs:
            raise InvalidRequestError(f"n must be at most {limits.max_num_seqs}, this server's slots, but is {n}.", "n")
        if len(prompts) * n > limits.max_num_choices:
            raise InvalidRequestError(
                f"A request may have at most {limits.max_num_choices} choices (prompts times n), but has {len(prompts) * n}.", "n"
            )
        if not prompts:
            raise InvalidRequestError("prompt must hold at least one prompt, but is empty.", "prompt")
        params.check_vocabulary(tokenizer.vocab_size)
        for prompt in prompts:
            check_prompt(prompt, tokenizer, limits.max_prompt_tokens)

    def _check_room(self, num_streams: int, num_tokens: int) -> None:
        limits = self.config
        room = limits.max_num_seqs + limits.max_queued_requests
        if len(self._streams) + num_streams > room:
            raise QueueFullError(
                f"The server is full: {len(self._streams)} of {room} places are taken. Try again later.",
                self._retry_after_s(num_streams),
            )
        waiting = sum(self._unread_tokens.values())
        if waiting and waiting + num_tokens > limits.max_queued_tokens:
            raise QueueFullError(
                f"The server is full: {waiting} prompt tokens wait, of at most {limits.max_queued_tokens}. Try again later.",
                self._retry_after_s(num_streams),
            )

    def _retry_after_s(self, num_streams: int) -> float:
        """Time in which that many places become free at the rate at which streams have lately ended."""
        least, most = _RETRY_AFTER_S
        if len(self._ends) < 2:
            return least
        seconds_each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(max(num_streams * seconds_each, least), most)

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, EngineReady):
            self._tokenizer = WorldTokenizer(message.vocab_size)
            self._tokenizer.encode("")  # builds the encoder before the first request would have to wait for it
        elif isinstance(message, StepOutput):
            self._on_step(message)

    def _on_step(self, message: StepOutput) -> None:
        streams, unread, logprobs = self._streams, self._unread_tokens, message.logprobs
        touched: list[Choice] = []
        for place, (stream_id, token_id) in enumerate(
            zip(unpack_ids(message.stream_ids), unpack_ids(message.token_ids), strict=True)
        ):
            choice = streams.get(stream_id)
            if choice is None:
                continue
            choice.push(token_id, logprobs.get(place) if logprobs else None)
            touched.append(choice)
            if unread:
                unread.pop(stream_id, None)
        for finish in message.finished:
            self._end_stream(finish)
        for choice in touched:
            choice.wake()

    def _end_stream(self, finish: Finish) -> None:
        choice = self._streams.pop(finish.stream_id, None)
        self._unread_tokens.pop(finish.stream_id, None)
        if choice is not None:
            self._ends.append(time.monotonic())
            choice.end(finish)
            choice.wake()

    def _on_death(self, reason: str) -> None:
        """Every request in a dead engine ends with an error at once."""
        error = f"The engine was lost while it worked on this request ({reason}); it is being restarted, please try again."
        for stream_id in list(self._streams):
            self._end_stream(Finish(stream_id, "error", error=error))


def check_prompt(prompt: Sequence[int], tokenizer: WorldTokenizer, max_prompt_tokens: int) -> None:
    """Raises InvalidRequestError if a prompt is empty, too long, or holds an id that the model has no row or text for."""
    if not prompt:
        raise InvalidRequestError("A prompt must hold at least one token, but is empty.", "prompt")
    if len(prompt) > max_prompt_tokens:
        raise InvalidRequestError(
            f"A prompt may have at most {max_prompt_tokens} tokens here, but this one has {len(prompt)}. Shorten it.",
            "prompt",
            "context_length_exceeded",
        )
    if min(prompt) < 0 or max(prompt) >= tokenizer.vocab_size or not set(tokenizer.undefined_ids).isdisjoint(prompt):
        bad = next(i for i in prompt if not 0 <= i < tokenizer.vocab_size or i in tokenizer.undefined_ids)
        raise InvalidRequestError(f"Token ids must have an entry in this model's vocabulary, but {bad} has none.", "prompt")
