"""An engine client without an engine: the same contract, scripted token ids, on the test's own event loop."""

import asyncio
import itertools
from array import array
from collections.abc import Callable, Sequence

from albatross.config import EngineConfig
from albatross.engine.client import (
    Choice,
    EngineReady,
    EngineStats,
    EngineStatus,
    Generation,
    PromptLogprobs,
    TokenLogprobs,
    WorkerStatus,
    check_prompt,
)
from albatross.engine.messages import Finish, ScoreColumns
from albatross.engine.status import combine
from albatross.errors import EngineDeadError, QueueFullError
from albatross.sampling_params import SamplingParams
from albatross.tokenizer.world import WorldTokenizer

VOCAB_SIZE = 4096
INFO = EngineReady(
    model_name="gosling", vocab_size=VOCAB_SIZE, num_layers=8, hidden_size=256, device="cpu", dtype="float32",
    state_dtype="float32", backend="reference", num_slots=64, state_bytes=1, load_s=0.1,
)  # fmt: skip
Script = Callable[[list[int], int], list[int]]


class FakeEngine:
    """Draws what `script(prompt, choice)` says, one token a step for every choice, then goes on with the last id."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = WorldTokenizer(VOCAB_SIZE)
        self.script: Script = lambda prompt, choice: [*self.tokenizer.encode(" Hello there."), 0]
        self.step_s = 0.0
        self.state = "ready"
        self.reason: str | None = None
        self.other_workers: list[WorkerStatus] = []  # beside the one that does all the work
        self.scored: list[int] = []  # lengths of the prompts that were scored, once each
        self.fails_at: int | None = None  # the step at which every choice ends with an error
        self.is_full = False
        self.held = asyncio.Event()  # cleared: no step is made
        self.held.set()
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.stops: list[tuple[str, ...]] = []
        self.running: dict[int, Choice] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def status(self) -> EngineStatus:
        stats = EngineStats(num_running=len(self.running), prompt_tokens=sum(map(len, self.prompts)))
        worker = WorkerStatus(self.state, self.reason, INFO, stats, 0)  # type: ignore[arg-type]
        return combine([worker, *self.other_workers])

    async def wait_ready(self) -> EngineReady:
        return INFO

    async def close(self) -> None:
        self.abort(list(self.running))

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
        if self.state != "ready":
            raise EngineDeadError("The engine is not ready.")
        params.check_vocabulary(VOCAB_SIZE)
        for prompt in prompts:
            check_prompt(prompt, self.tokenizer, self.config.max_prompt_tokens)
        if self.is_full:
            raise QueueFullError("The server is full.", 7.2)
        self.prompts += [list(prompt) for prompt in prompts]
        self.params.append(params)
        self.stops.append(tuple(stop))
        generation = Generation(self, sum(map(len, prompts)))  # type: ignore[arg-type]
        scripts: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            prompt_logprobs = PromptLogprobs() if params.prompt_logprobs is not None else None
            for i in range(n):
                choice = Choice(
                    number * n + i, next(self._ids), self.tokenizer, stop=stop, include_stop=include_stop,
                    min_tokens=params.min_tokens, wants_logprobs=params.logprobs is not None,
                    prompt_logprobs=prompt_logprobs, wake=generation.wake,
                    abort=lambda stream_id: self.abort([stream_id]),
                )  # fmt: skip
                generation.choices.append(choice)
                self.running[choice.stream_id] = choice
                scripts[choice.stream_id] = self.script(list(prompt), choice.index)
            if prompt_logprobs is not None:
                self._score(prompt, params.prompt_logprobs or 0, prompt_logprobs)
        task = asyncio.ensure_future(self._draw(scripts, params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    def _score(self, prompt: Sequence[int], num_top: int, prompt_logprobs: PromptLogprobs) -> None:
        """Token i has logprob -i / 8 and rank i; the likeliest is id 77, then id 228, whose logprob has no JSON."""
        self.scored.append(len(prompt))
        places = range(1, len(prompt))
        top = [(77, -0.0625), (228, float("-inf"))][:num_top]
        prompt_logprobs.extend(ScoreColumns(
            array("f", [-i / 8 for i in places]).tobytes(),
            array("I", places).tobytes(),
            array("I", [token_id for _ in places for token_id, _ in top]).tobytes(),
            array("f", [value for _ in places for _, value in top]).tobytes(),
        ))  # fmt: skip

    def abort(self, stream_ids: Sequence[int]) -> None:
        for stream_id in stream_ids:
            self._end(Finish(stream_id, "abort"))

    def die(self) -> None:
        """What the client does when its engine process is gone."""
        self.state, self.reason = "restarting", "the engine process ended with signal 9"
        for stream_id in list(self.running):
            self._end(Finish(stream_id, "error", error="The engine was lost while it worked on this request."), is_lost=True)

    async def _draw(self, scripts: dict[int, list[int]], params: SamplingParams) -> None:
        limit = (
            self.config.max_output_tokens if params.max_tokens is None else min(params.max_tokens, self.config.max_output_tokens)
        )
        for step in itertools.count():
            await self.held.wait()
            await asyncio.sleep(self.step_s)
            live = [stream_id for stream_id in scripts if stream_id in self.running]
            if not live:
                return
            for stream_id in live:
                self._step(stream_id, step, scripts[stream_id], params, limit)

    def _step(self, stream_id: int, step: int, script: list[int], params: SamplingParams, limit: int) -> None:
        if step == self.fails_at:
            self._end(Finish(stream_id, "error", error="The logits of this request were not finite."))
            return
        if step >= limit:
            self._end(Finish(stream_id, "length"))
            return
        choice = self.running[stream_id]
        token_id = script[min(step, len(script) - 1)]
        logprobs = TokenLogprobs(-0.25, (token_id, 77, 228)[: params.logprobs], (-0.25, -2.0, float("-inf"))[: params.logprobs])
        choice.push(token_id, logprobs if params.logprobs is not None else None)
        is_stop = token_id in params.stop_token_ids or (token_id == 0 and not params.ignore_eos)
        if is_stop and step >= params.min_tokens:
            self._end(Finish(stream_id, "stop", token_id))
        elif step + 1 == limit:
            self._end(Finish(stream_id, "length"))
        choice.wake()

    def _end(self, finish: Finish, is_lost: bool = False) -> None:
        choice = self.running.pop(finish.stream_id, None)
        if choice is not None:
            choice.end(finish, is_lost=is_lost)
            choice.wake()
