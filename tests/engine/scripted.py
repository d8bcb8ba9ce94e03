"""A runner without a model: a function gives the logits, so that the engine's logic is tested with no weights."""

from collections.abc import Callable, Sequence

import torch

from albatross.config import EngineConfig
from albatross.engine.core import EngineCore
from albatross.engine.messages import AddRequest, EngineReady, Finish, StepOutput, pack_ids, unpack_ids
from albatross.engine.request import Request, Stream
from albatross.engine.sampler import Sampler, Samples
from albatross.engine.scheduler import Step
from albatross.sampling_params import SamplingParams

VOCAB = 100
GREEDY = SamplingParams(temperature=0)
Script = Callable[[Request, Stream], torch.Tensor]


def peak(token_id: int, vocab_size: int = VOCAB) -> torch.Tensor:
    logits = torch.zeros(vocab_size)
    logits[token_id] = 10.0
    return logits


def repeat_prompt(request: Request, stream: Stream) -> torch.Tensor:
    """Spells the request's own prompt, over and over."""
    return peak(request.prompt[stream.num_generated % len(request.prompt)])


class ScriptedRunner:
    """Records every step it ran. `slot_owner` proves that no slot serves two requests at once."""

    def __init__(self, script: Script = repeat_prompt, num_slots: int = 4, vocab_size: int = VOCAB) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.device = torch.device("cpu")
        self.sampler = Sampler(num_slots, vocab_size, self.device)
        self.steps: list[Step] = []
        self._script = script

    def run(self, step: Step) -> Samples:
        self.steps.append(step)
        for request in step.admitted:
            self.sampler.assign(request)
        slots = [row.slot for row in step.rows]
        if len(set(slots)) != len(slots):
            raise RuntimeError(f"two rows share a slot: {slots}")
        pairs = [(row.request, stream) for row in step.rows for stream in row.samples]
        if not pairs:
            return Samples([], [], {})
        logits = torch.stack([self._script(request, stream) for request, stream in pairs])
        return self.sampler.sample(logits, [s.slot for _, s in pairs], [s.num_generated for _, s in pairs])

    def forbid(self, token_ids: Sequence[int]) -> None:
        self.sampler.forbid(token_ids)

    def describe(self, model_name: str, load_s: float) -> EngineReady:
        return EngineReady(
            model_name, self.vocab_size, 1, 64, "cpu", "float32", "float32", "reference", self.num_slots, 0, load_s
        )


class Engine:
    """An EngineCore on a ScriptedRunner, and what its streams have received."""

    def __init__(self, script: Script = repeat_prompt, num_slots: int = 4, budget: int = 64, **settings: int) -> None:
        self.runner = ScriptedRunner(script, num_slots)
        config = EngineConfig(max_num_seqs=num_slots, max_num_batched_tokens=budget, **settings)
        self.core = EngineCore(config, self.runner)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.outputs: list[StepOutput] = []

    def add(
        self, *stream_ids: int, prompt: Sequence[int] = (5, 6, 7), params: SamplingParams = GREEDY, priority: int = 0
    ) -> None:
        for stream_id in stream_ids:
            self.tokens[stream_id] = []
        self.core.add(AddRequest(stream_ids, pack_ids(list(prompt)), params, priority))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            output = self.core.step()
            self.outputs.append(output)
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
