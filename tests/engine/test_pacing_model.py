"""Pacing with the demo model on the CPU and a simulated clock: it holds the same bounds there, and changes no token."""

import random
from collections.abc import Callable
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import VOCAB, Clock, Engine, SlotState, peak
from simulated import steps_sat_out

from albatross import LLM, SamplingParams
from albatross.config import EngineConfig
from albatross.engine.core import EngineCore
from albatross.engine.messages import AbortRequest
from albatross.engine.model_runner import ModelRunner, Pending
from albatross.engine.scheduler import Step

TILE = 8


def cost(step: Step) -> float:
    """Products in tiles, so that a prompt is dear beside few streams and the first row beyond a tile is too."""
    return 1e-3 + 2e-3 * ceil(step.width / TILE)


class TimedRunner(ModelRunner):
    """The model on the CPU, whose steps take what `cost` says."""

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        super().__init__(config)
        self.steps: list[Step] = []
        self._clock = clock

    def launch(self, step: Step) -> Pending:
        self.steps.append(step)
        self._clock.advance(cost(step))
        return super().launch(step)


class TimedLLM(LLM):
    def __init__(self, **fields: float) -> None:
        super().__init__(device="cpu", num_threads=1, **fields)
        self.clock = Clock()
        self.runner = TimedRunner(self.config, self.clock)
        self._core = EngineCore(self.config, self.runner, self.clock)


def prompts() -> list[list[int]]:
    """Short ones, one at a time once the first have slots, and two that take several steps."""
    rng = random.Random(5)
    lengths = [2] * 15 + [200] + [2] * 10 + [300] + [2] * 6
    return [[rng.randrange(100, 4000) for _ in range(length)] for length in lengths]


def answers(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=8 + i, ignore_eos=True) for i in range(len(prompts()))]
    outputs = llm.generate(prompts(), params, progress=False)
    return [output.choices[0].token_ids for output in outputs]


def test_any_cut_and_any_stream_that_sits_out_gives_the_same_answers() -> None:
    paced, plain = TimedLLM(max_num_seqs=16), TimedLLM(max_num_seqs=16, prefill_pace=0)
    assert answers(paced) == answers(plain)
    assert any(steps_sat_out(paced.runner.steps).values())
    chunks = [[len(chunk.tokens) for step in llm.runner.steps for chunk in step.chunks] for llm in (paced, plain)]
    assert sorted(chunks[0]) != sorted(chunks[1])


def test_the_demo_model_keeps_its_pace_while_a_long_prompt_is_read() -> None:
    llm = TimedLLM(max_num_seqs=16)
    streams = [llm.submit([7, 8, 9], SamplingParams(temperature=0, ignore_eos=True, max_tokens=300))[0] for _ in range(14)]
    times: dict[int, list[float]] = {stream.stream_id: [] for stream in streams}
    undisturbed = 1000 / 256 * (1e-3 + 2e-3 * 256 / TILE)
    long, started, ended = None, 0.0, 0.0
    for choice, _ in llm.run():
        times.setdefault(choice.stream_id, []).append(llm.clock.now)
        if long is None and len(times[streams[-1].stream_id]) == 10:
            long, started = llm.submit([11] * 1000, SamplingParams(temperature=0, max_tokens=1))[0], llm.clock.now
        if long is not None and long.finish_reason and not ended:
            ended = llm.clock.now
            llm.abort(streams)
    normal = 1e-3 + 2e-3 * ceil(14 / TILE)
    gaps = [b - a for stream in streams for a, b in zip(times[stream.stream_id][9:], times[stream.stream_id][10:], strict=False)]
    assert max(gaps) < 5 * normal
    assert ended - started < undisturbed / 0.6


def hashed(state: SlotState) -> torch.Tensor:
    """Logits that depend on everything a slot has read; some streams end early."""
    key = hash((tuple(state.prompt), tuple(state.drawn)))
    return peak(0 if key % 11 == 0 else key % VOCAB) / 2


def play(seed: int, step_cost: Callable[[Step], float], run_ahead: int, **fields: int) -> Engine:
    """Streams that come, stop, and are aborted; sampled ones with penalties among them."""
    rng = random.Random(seed)
    engine = Engine(hashed, num_slots=24, budget=64, cost=step_cost, run_ahead=run_ahead, **fields)
    for stream_id in range(0, 120, 2):
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=stream_id, max_tokens=rng.randrange(12, 40), frequency_penalty=stream_id % 3
        )
        number = rng.randrange(1, 3)
        engine.add(*range(stream_id, stream_id + number), prompt=[1 + stream_id % 90] * rng.randrange(1, 30), params=params)
    aborted = [(rng.randrange(60), rng.randrange(120)) for _ in range(5)]
    for step in range(60):
        engine.core.abort(AbortRequest(tuple(stream_id for when, stream_id in aborted if when == step)))
        engine.step()
    engine.drain()
    for _, stream_id in aborted:
        engine.tokens.pop(stream_id, None)
    return engine


@given(st.integers(0, 1000))
@settings(max_examples=8, deadline=None)
def test_streams_that_come_stop_and_sit_out_draw_what_they_would_alone(seed: int) -> None:
    plain = play(seed, lambda step: 1.0, 0, prefill_pace=0)
    for run_ahead in (0, 1):
        paced = play(seed, lambda step: 1e-3 + ceil(step.width / 8), run_ahead)
        assert paced.tokens == plain.tokens
        assert {i: f.reason for i, f in paced.finished.items() if i in paced.tokens} == {
            i: f.reason for i, f in plain.finished.items() if i in plain.tokens
        }
        assert paced.is_idle


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_stream_that_sits_out_its_last_step_still_draws_its_last_token(run_ahead: int) -> None:
    engine = Engine(num_slots=16, budget=64, cost=lambda step: 1e-3 + ceil(step.width / 16), run_ahead=run_ahead)
    params = SamplingParams(temperature=0, max_tokens=40)
    for stream_id in range(15):
        engine.add(stream_id, params=params)
    for stream_id in range(15, 300):
        engine.add(stream_id, prompt=[5, 6], params=SamplingParams(temperature=0, max_tokens=1))
    engine.drain()
    assert any(steps_sat_out(engine.runner.steps).values())
    assert all(engine.tokens[stream_id] == [5, 6, 7] * 13 + [5] for stream_id in range(15))
    assert engine.is_idle
