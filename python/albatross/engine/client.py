"""The front's side of the engine: takes prompts as ids, gives back choices that fill as the engines step.

Admission is decided here, at once: a request beyond slots and queues is refused before it is sent. What is taken goes to
the least busy worker. Used by the server and by batch processing.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from albatross.config import EngineConfig
from albatross.engine.messages import EngineReady, EngineStats, TokenLogprobs
from albatross.engine.output_processor import Choice, Delta
from albatross.engine.prompt_logprobs import PromptLogprobs, PromptTokenLogprobs
from albatross.engine.router import Router
from albatross.engine.status import EngineStatus, WorkerStatus, combine
from albatross.engine.supervisor import ENGINE_COMMAND
from albatross.engine.worker import Worker
from albatross.errors import AlbatrossError, EngineDeadError, InvalidRequestError, QueueFullError
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
    "PromptLogprobs",
    "PromptTokenLogprobs",
    "TokenLogprobs",
    "WorkerStatus",
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
    """All workers, each an engine process with its requests. All methods run on one event loop."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.config = config
        self._workers = [Worker(i, config, command, self._on_ready, self._on_end) for i in range(config.workers)]
        self._router = Router(config.workers)
        self._stream_ids = itertools.count(1)
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)
        self._tokenizer: WorldTokenizer | None = None

    @classmethod
    async def start(cls, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> "EngineClient":
        """Starts the engine processes and returns at once; see `wait_ready`. `command` replaces the engine in benchmarks."""
        client = cls(config, command)
        for worker in client._workers:
            worker.supervisor.start()
        return client

    async def wait_ready(self) -> EngineReady:
        """Returns once all workers are ready, with the first one's description.

        Raises what kept an engine from starting (CheckpointError, NativeLibraryError, ConfigError, ...) after having
        stopped the others.
        """
        try:
            return (await asyncio.gather(*(worker.supervisor.wait_ready() for worker in self._workers)))[0]
        except AlbatrossError:
            await asyncio.gather(*(worker.close() for worker in self._workers if worker.status.state != "failed"))
            raise

    @property
    def status(self) -> EngineStatus:
        return combine([worker.status for worker in self._workers])

    @property
    def tokenizer(self) -> WorldTokenizer:
        """Raises EngineDeadError before the first engine is ready."""
        if self._tokenizer is None:
            raise self._not_ready()
        return self._tokenizer

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

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

        A prompt goes with all its choices to one worker, several prompts may be spread over them.
        Raises InvalidRequestError, QueueFullError, or EngineDeadError, and has then started nothing.
        """
        tokenizer = self.tokenizer
        self._check(prompts, params, n, tokenizer)
        self._check_room(len(prompts) * n, sum(map(len, prompts)))
        generation = Generation(self, sum(map(len, prompts)))
        for number, prompt in enumerate(prompts):
            prompt_logprobs = PromptLogprobs() if params.prompt_logprobs is not None else None
            choices = [
                Choice(
                    number * n + i, next(self._stream_ids), tokenizer,
                    stop=stop, include_stop=include_stop, min_tokens=params.min_tokens,
                    wants_logprobs=params.logprobs is not None, prompt_logprobs=prompt_logprobs,
                    wake=generation.wake, abort=self._abort_one,
                )
                for i in range(n)
            ]  # fmt: skip
            generation.choices += choices
            try:
                self._place(choices, prompt, params, priority)
            except EngineDeadError:
                generation.abort()
                raise
        return generation

    def abort(self, stream_ids: Sequence[int]) -> None:
        """Ends these streams here and in their engines; finished and unknown ones are passed over."""
        for worker in self._workers:
            worker.abort(stream_ids)

    def _abort_one(self, stream_id: int) -> None:
        self.abort((stream_id,))

    def _place(self, choices: Sequence[Choice], prompt: Sequence[int], params: SamplingParams, priority: int) -> None:
        """Gives a prompt to the least busy worker; to the next one if that one turns out to be gone."""
        refusal: EngineDeadError | None = None
        for number in self._router.order([worker.load for worker in self._workers]):
            try:
                self._workers[number].add(choices, prompt, params, priority)
                return
            except EngineDeadError as error:
                refusal = error
        raise refusal or self._not_ready()

    def _check(self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, tokenizer: WorldTokenizer) -> None:
        limits = self.config
        if n < 1:
            raise InvalidRequestError(f"n must be at least 1, but is {n}.", "n")
        if n > limits.max_num_seqs:
            raise InvalidRequestError(f"n must be at most {limits.max_num_seqs}, the slots of one worker, but is {n}.", "n")
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
        """The places of all workers that are ready are one stock."""
        limits = self.config
        loads = [load for load in (worker.load for worker in self._workers) if load is not None]
        if not loads:
            raise self._not_ready()
        room = len(loads) * (limits.max_num_seqs + limits.max_queued_requests)
        if sum(loads) + num_streams > room:
            raise QueueFullError(
                f"The server is full: {sum(loads)} of {room} places are taken. Try again later.", self._retry_after_s(num_streams)
            )
        waiting, most = sum(worker.num_unread_tokens for worker in self._workers), len(loads) * limits.max_queued_tokens
        if waiting and waiting + num_tokens > most:
            raise QueueFullError(
                f"The server is full: {waiting} prompt tokens wait, of at most {most}. Try again later.",
                self._retry_after_s(num_streams),
            )

    def _retry_after_s(self, num_streams: int) -> float:
        """Time in which that many places become free at the rate at which streams have lately ended."""
        least, most = _RETRY_AFTER_S
        if len(self._ends) < 2:
            return least
        seconds_each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(max(num_streams * seconds_each, least), most)

    def _not_ready(self) -> EngineDeadError:
        return EngineDeadError(f"The engine is not ready: {self.status.reason}.")

    def _on_ready(self, info: EngineReady) -> None:
        self._tokenizer = WorldTokenizer(info.vocab_size)
        self._tokenizer.encode("")  # builds the encoder before the first request would have to wait for it

    def _on_end(self) -> None:
        self._ends.append(time.monotonic())



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
