"""A runner without a model: a function gives the logits, so that the engine's logic is tested with no weights.

It keeps what a device keeps: for each slot the tokens that were read in it. The host sees them only through `Pending.wait`,
which may be called after further steps were launched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from albatross.config import EngineConfig
from albatross.engine.core import EngineCore
from albatross.engine.messages import AddRequest, EngineReady, Finish, ScoreColumns, StepOutput, pack_ids, unpack_ids
from albatross.engine.model_runner import Pending
from albatross.engine.pacing import Timing
from albatross.engine.sampler import Sampler, Samples
from albatross.engine.scheduler import Step
from albatross.sampling_params import SamplingParams

VOCAB = 100
NOT_FINITE = 98  # a prompt cannot be scored at this token
GREEDY = SamplingParams(temperature=0)


@dataclass
class SlotState:
    """What one slot has read since it was zeroed, and for which stream."""

    stream_id: int
    prompt: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)


Script = Callable[[SlotState], torch.Tensor]


def peak(token_id: int, vocab_size: int = VOCAB) -> torch.Tensor:
    logits = torch.zeros(vocab_size)
    logits[token_id] = 10.0
    return logits


def repeat_prompt(state: SlotState) -> torch.Tensor:
    """Spells the request's own prompt, over and over."""
    return peak(state.prompt[len(state.drawn) % len(state.prompt)])


class LatePending:
    """Insists on being waited for once, and in order. Scores of a chunk are the ids they are of, in the place of ranks."""

    def __init__(self, runner: "ScriptedRunner", number: int, pending: Pending, step: Step) -> None:
        self._runner = runner
        self._number = number
        self._pending = pending
        self._targets = {place: chunk.targets for place, chunk in enumerate(step.chunks) if chunk.targets}

    def wait(self) -> Samples:
        if self._number != self._runner.num_waited:
            raise RuntimeError(f"step {self._number} was waited for when {self._runner.num_waited} was due")
        self._runner.num_waited += 1
        samples = self._pending.wait()
        samples.bad_chunks = [place for place, targets in self._targets.items() if NOT_FINITE in targets]
        samples.scores = {
            place: ScoreColumns(b"", targets.tobytes(), b"", b"")
            for place, targets in self._targets.items()
            if place not in samples.bad_chunks
        }
        return samples


class ScriptedRunner:
    """Records every step it ran, and fails if a row runs in a slot that is not its own."""

    def __init__(self, script: Script = repeat_prompt, num_slots: int = 4, vocab_size: int = VOCAB) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.device = torch.device("cpu")
        self.timings: tuple[Timing, ...] = ()
        self.sampler = Sampler(num_slots, vocab_size, self.device, "reference")
        self.steps: list[Step] = []
        self.num_waited = 0
        self.most_in_flight = 0
        self.on_launch: Callable[[Step], None] = lambda step: None
        self._script = script
        self._slots: dict[int, SlotState] = {}

    def launch(self, step: Step) -> Pending:
        self.steps.append(step)
        self.on_launch(step)
        self.most_in_flight = max(self.most_in_flight, len(self.steps) - self.num_waited)
        for request in step.admitted:
            self.sampler.assign(request)
            self._slots.update((stream.slot, SlotState(stream.stream_id)) for stream in request.streams)
        self._check_rows(step)
        for stream, _ in step.draws[: step.num_decoding]:
            self._slots[stream.slot].drawn.append(int(self.sampler.last_token[stream.slot]))
        for chunk in step.chunks:
            prompt = self._slots[chunk.slot].prompt
            prompt += chunk.tokens
            for stream in chunk.samples:
                self._slots[stream.slot].prompt = list(prompt)
        slots = [stream.slot for stream, _ in step.draws]
        logits = torch.stack([self._script(self._slots[slot]) for slot in slots]) if slots else torch.empty(0, self.vocab_size)
        if slots:
            self.sampler.draw(logits, torch.tensor(slots, dtype=torch.int32))
        return LatePending(self, len(self.steps) - 1, self.sampler.collect(logits, slots), step)

    def forbid(self, token_ids: Sequence[int]) -> None:
        self.sampler.forbid(token_ids)

    def describe(self, model_name: str, load_s: float) -> EngineReady:
        return EngineReady(
            model_name, self.vocab_size, 1, 64, "cpu", "float32", "float32", "reference", self.num_slots, 0, load_s
        )

    def _check_rows(self, step: Step) -> None:
        slots = [stream.slot for stream, _ in step.draws[: step.num_decoding]] + [chunk.slot for chunk in step.chunks]
        if len(set(slots)) != len(slots):
            raise RuntimeError(f"two rows share a slot: {slots}")
        for stream, _ in step.draws:
            if self._slots[stream.slot].stream_id != stream.stream_id:
                raise RuntimeError(f"slot {stream.slot} of stream {stream.stream_id} was handed to another")


class Clock:
    """Stands still but where it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Engine:
    """An EngineCore on a ScriptedRunner, and what its streams have received.

    cost: seconds of a step, on a clock that stands still otherwise; without it all take the same.
    """

    def __init__(
        self,
        script: Script = repeat_prompt,
        num_slots: int = 4,
        budget: int = 64,
        cost: Callable[[Step], float] = lambda step: 1.0,
        **settings: int,
    ) -> None:
        clock = Clock()
        self.runner = ScriptedRunner(script, num_slots)
        self.runner.on_launch = lambda step: clock.advance(cost(step))
        config = EngineConfig(max_num_seqs=num_slots, max_num_batched_tokens=budget, **settings)
        self.core = EngineCore(config, self.runner, clock)
        self.tokens: dict[int, list[int]] = {}
        self.scored: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.outputs: list[StepOutput] = []

    def add(
        self, *stream_ids: int, prompt: Sequence[int] = (5, 6, 7), params: SamplingParams = GREEDY, priority: int = 0
    ) -> None:
        for stream_id in stream_ids:
            self.tokens[stream_id] = []
            self.scored[stream_id] = []
        self.core.add(AddRequest(stream_ids, pack_ids(list(prompt)), params, priority))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            output = self.core.step()
            self.outputs.append(output)
            for piece in output.scores:
                for stream_id in piece.stream_ids:
                    self.scored[stream_id] += unpack_ids(piece.columns.ranks)
            for stream_id, token_id in zip(unpack_ids(output.stream_ids), unpack_ids(output.token_ids), strict=True):
                self.tokens[stream_id].append(token_id)
            for finish in output.finished:
                self.finished[finish.stream_id] = finish

    def drain(self, most: int = 1000) -> None:
        for _ in range(most):
            if not self.core.has_work:
                return
            self.step()
        raise RuntimeError(f"work is left after {most} steps")

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight, and every slot is free."""
        stats = self.core.stats()
        return not self.core.has_work and (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
