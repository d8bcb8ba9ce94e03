"""The heart: schedule -> run -> settle, one step at a time. Knows no sockets, no text and no asyncio.

Called in a loop by `process` (a process of its own), by `LLM` and by tests (in the caller's process).
"""

import time
from collections.abc import Iterable, Sequence

from albatross.config import EngineConfig
from albatross.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    EngineStats,
    Finish,
    StepOutput,
    TokenLogprobs,
    pack_ids,
)
from albatross.engine.model_runner import ModelRunner, Runner
from albatross.engine.request import Request
from albatross.engine.sampler import Samples
from albatross.engine.scheduler import Drawn, Scheduler, Step


class EngineCore:
    """One model, one scheduler. Not thread-safe: one caller adds, aborts and steps."""

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        """Loads the model. Raises the errors of `load_model` and ConfigError for a device that is not there."""
        started = time.monotonic()
        self.config = config
        self.runner: Runner = runner or ModelRunner(config)
        self.scheduler = Scheduler(self.runner.num_slots, config.token_budget(self.runner.device.type))
        self._step_ms = 0.0
        self._load_s = time.monotonic() - started

    def add(self, message: AddRequest) -> None:
        self.scheduler.add(Request.from_message(message, self.config.max_output_tokens))

    def abort(self, message: AbortRequest) -> None:
        self.scheduler.abort(message.stream_ids)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> StepOutput:
        started = time.monotonic()
        step = self.scheduler.schedule()
        samples = self.runner.run(step)
        finished = self.scheduler.settle(step, Drawn(samples.token_ids, samples.is_bad))
        self._step_ms = (time.monotonic() - started) * 1e3
        return self._output(step, samples, finished)

    def stats(self) -> EngineStats:
        return self.scheduler.stats(self._step_ms)

    def ready(self) -> EngineReady:
        return self.runner.describe(self.config.model_name, self._load_s)

    def forbid(self, token_ids: Sequence[int]) -> None:
        """Ids that no request ever draws: those the vocabulary has no entry for."""
        self.runner.forbid(token_ids)

    def _output(self, step: Step, samples: Samples, finished: list[Finish]) -> StepOutput:
        stream_ids = [stream.stream_id for row in step.rows for stream in row.samples]
        logprobs, token_ids = samples.logprobs, samples.token_ids
        if any(samples.is_bad):
            stream_ids, token_ids, logprobs = _without_bad(stream_ids, samples)
        return StepOutput(pack_ids(stream_ids), pack_ids(token_ids), tuple(finished), logprobs, self.stats())


def _without_bad(stream_ids: Iterable[int], samples: Samples) -> tuple[list[int], list[int], dict[int, TokenLogprobs]]:
    """The columns without the rows whose logits were not finite, and logprobs at their places in what is left."""
    ids: list[int] = []
    tokens: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    for row, (stream_id, token_id, is_bad) in enumerate(zip(stream_ids, samples.token_ids, samples.is_bad, strict=True)):
        if is_bad:
            continue
        if row in samples.logprobs:
            logprobs[len(ids)] = samples.logprobs[row]
        ids.append(stream_id)
        tokens.append(token_id)
    return ids, tokens, logprobs
