"""The heart: schedule -> launch -> settle, one step at a time. Knows no sockets, no text and no asyncio.

Called in a loop by `process` (a process of its own), by `LLM` and by tests (in the caller's process). On CUDA a step is
scheduled and launched before the one ahead of it is settled, so that the device never waits for the host.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from albatross.config import EngineConfig
from albatross.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    EngineStats,
    PromptScores,
    StepOutput,
    pack_ids,
)
from albatross.engine.model_runner import ModelRunner, Pending, Runner
from albatross.engine.pacing import Pacer
from albatross.engine.request import Request
from albatross.engine.sampler import Samples
from albatross.engine.scheduler import Scheduler, Settled, Step


class EngineCore:
    """One model, one scheduler. Not thread-safe: one caller adds, aborts and steps."""

    def __init__(
        self, config: EngineConfig, runner: Runner | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Loads the model. Raises the errors of `load_model` and ConfigError for a device that is not there.

        clock: seconds, by which steps are timed.
        """
        started = time.monotonic()
        self.config = config
        self.runner: Runner = runner or ModelRunner(config)
        device_type = self.runner.device.type
        budget = config.token_budget(device_type)
        pacer = Pacer(self.runner.num_slots, budget, config.prefill_pace)
        self.scheduler = Scheduler(self.runner.num_slots, pacer)
        self._times = pacer.times
        self._times.expect(self.runner.timings)
        self._clock = clock
        self._run_ahead = config.steps_ahead(device_type)
        self._in_flight: deque[tuple[Step, Pending, float]] = deque()
        self._settled_at = 0.0
        self._step_ms = 0.0
        self._load_s = time.monotonic() - started

    def add(self, message: AddRequest) -> None:
        self.scheduler.add(Request.from_message(message, self.config.max_output_tokens))

    def abort(self, message: AbortRequest) -> None:
        self.scheduler.abort(message.stream_ids)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: streams that have not ended, or steps whose results have not been read."""
        return bool(self._in_flight) or self.scheduler.has_work

    def step(self) -> StepOutput:
        """Launches what can be launched ahead, waits for the oldest step in flight, and returns what it gave."""
        while len(self._in_flight) <= self._run_ahead:
            step = self.scheduler.schedule()
            if step.is_empty:
                break
            launched_at = self._clock()  # where launching is running, the time of the launch counts
            self._in_flight.append((step, self.runner.launch(step), launched_at))
        if not self._in_flight:
            return StepOutput(b"", b"", stats=self.stats())
        step, pending, launched_at = self._in_flight.popleft()
        samples = pending.wait()
        settled = self.scheduler.settle(step, samples.token_ids, samples.is_bad, samples.bad_chunks)
        now = self._clock()
        seconds = now - max(launched_at, self._settled_at)
        self._times.observe(bool(step.chunks), step.width, seconds)
        self._step_ms, self._settled_at = seconds * 1e3, now
        return self._output(samples, settled)

    def stats(self) -> EngineStats:
        return self.scheduler.stats(self._step_ms)

    def ready(self) -> EngineReady:
        return self.runner.describe(self.config.model_name, self._load_s)

    def forbid(self, token_ids: Sequence[int]) -> None:
        """Ids that no request ever draws: those the vocabulary has no entry for."""
        self.runner.forbid(token_ids)

    def _output(self, samples: Samples, settled: Settled) -> StepOutput:
        logprobs = {}
        if samples.logprobs:
            kept = enumerate(settled.places)
            logprobs = {column: samples.logprobs[place] for column, place in kept if place in samples.logprobs}
        scores = tuple(PromptScores(stream_ids, samples.scores[place]) for place, stream_ids in settled.scored.items())
        return StepOutput(
            pack_ids(settled.stream_ids), pack_ids(settled.token_ids), tuple(settled.finished), logprobs, self.stats(), scores
        )
