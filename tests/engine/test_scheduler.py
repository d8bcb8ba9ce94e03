"""Queues, slots, the token budget and running ahead, on a runner without a model, at both depths."""

import random
from itertools import pairwise

import msgspec
import pytest
import torch
from scripted import GREEDY, VOCAB, Engine, SlotState, peak
from simulated import steps_sat_out

from albatross.engine.messages import AbortRequest
from albatross.engine.pacing import Pacer, Share
from albatross.engine.scheduler import REST_STEPS
from albatross.errors import InvalidRequestError
from albatross.sampling_params import SamplingParams


@pytest.fixture(autouse=True, params=["0", "1"])
def run_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How far the engine runs ahead, where a test does not say."""
    monkeypatch.setenv("ALBATROSS_RUN_AHEAD", request.param)
    return int(request.param)


def limited(max_tokens: int, **fields: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, max_tokens=max_tokens, **fields)


def test_each_of_fifty_requests_gets_its_own_answer() -> None:
    engine = Engine(num_slots=8, budget=32)
    rng = random.Random(1)
    prompts = {i: [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 40))] for i in range(50)}
    for stream_id, prompt in prompts.items():
        engine.add(stream_id, prompt=prompt, params=limited(2 * len(prompt)))
    engine.drain()
    assert engine.tokens == {i: prompt * 2 for i, prompt in prompts.items()}
    assert {finish.reason for finish in engine.finished.values()} == {"length"}


def test_every_running_stream_decodes_in_every_step_while_a_long_prompt_is_read() -> None:
    engine = Engine(num_slots=4, budget=32)
    engine.add(1, 2, params=limited(500))
    engine.step(3)
    engine.add(9, prompt=[3] * 1000, params=limited(1))
    before = len(engine.tokens[1])
    engine.step(20)
    assert len(engine.tokens[1]) == len(engine.tokens[2]) == before + 20
    engine.step(20)
    assert engine.finished[9].reason == "length"


def test_no_step_exceeds_the_token_budget() -> None:
    engine = Engine(num_slots=8, budget=20)
    for stream_id in range(12):
        engine.add(stream_id, prompt=[1 + stream_id] * 37, params=limited(5))
    engine.drain()
    assert max(step.num_tokens for step in engine.runner.steps) <= 20


def test_a_short_prompt_behind_a_long_one_is_read_in_the_same_steps() -> None:
    engine = Engine(num_slots=4, budget=64)
    engine.add(1, prompt=[1] * 100_000, params=limited(1))
    engine.step()
    engine.add(2, prompt=[2] * 30, params=limited(1))
    engine.step(2)
    assert engine.finished[2].reason == "length"


def test_a_long_prompt_keeps_a_quarter_of_the_budget_while_short_ones_arrive_for_ever() -> None:
    engine = Engine(num_slots=4, budget=64)
    engine.add(0, prompt=[1] * 1600, params=limited(1))
    for arrival in range(1, 101):
        engine.add(arrival, prompt=[2] * 64, params=limited(1))
        engine.step()
    assert 0 in engine.finished


def test_a_long_prompt_that_waits_is_not_passed_over_for_ever_by_shorter_ones() -> None:
    engine = Engine(num_slots=4, budget=64)
    engine.add(1, prompt=[1] * 100, params=limited(1))
    engine.step()
    engine.add(0, prompt=[1] * 600, params=limited(1))
    for arrival in range(2, 52):
        engine.add(arrival, prompt=[2] * 70, params=limited(1))
        engine.step()
    assert 0 in engine.finished


def test_a_prompt_with_less_to_read_goes_first_but_not_before_one_of_a_lower_priority_value() -> None:
    engine = Engine(num_slots=4, budget=64)
    for stream_id, length, priority in ((1, 300, 0), (2, 40, 1), (3, 60, 0), (4, 30, 0)):
        engine.add(stream_id, prompt=[stream_id] * length, params=limited(1), priority=priority)
    engine.drain()
    assert list(engine.finished) == [4, 3, 1, 2]


def test_what_a_step_may_read_of_prompts_is_read_whole() -> None:
    engine = Engine(num_slots=4, budget=64)
    for stream_id, length in ((1, 300), (2, 30), (3, 7)):
        engine.add(stream_id, prompt=[stream_id] * length, params=limited(1))
    engine.drain()
    assert [step.num_tokens for step in engine.runner.steps] == [64] * 5 + [17]


def test_requests_are_served_in_order_of_arrival_within_a_priority() -> None:
    engine = Engine(num_slots=1, budget=64)
    for stream_id, priority in ((1, 0), (2, 5), (3, 0), (4, -1), (5, 5)):
        engine.add(stream_id, params=limited(1), priority=priority)
    engine.drain()
    assert list(engine.finished) == [4, 1, 3, 2, 5]


def test_a_freed_slot_is_used_in_the_next_step() -> None:
    engine = Engine(num_slots=1)
    engine.add(1, params=limited(1))
    engine.add(2, params=limited(1))
    engine.step(2)
    assert list(engine.finished) == [1, 2]


def test_choices_of_one_prompt_read_it_once_and_fork() -> None:
    engine = Engine(num_slots=4)
    engine.add(1, 2, 3, prompt=[7, 8], params=limited(4))
    engine.drain()
    assert sum(len(step.chunks) for step in engine.runner.steps) == 1
    assert engine.tokens == {1: [7, 8, 7, 8], 2: [7, 8, 7, 8], 3: [7, 8, 7, 8]}


def test_a_request_of_several_choices_waits_for_that_many_slots() -> None:
    engine = Engine(num_slots=4)
    engine.add(1, 2, params=limited(3))
    engine.add(3, 4, 5, params=limited(1))
    engine.step(2)
    assert engine.tokens[3] == []
    engine.drain()
    assert engine.finished[3].reason == "length"


def test_max_tokens_zero_reads_the_prompt_and_draws_nothing() -> None:
    engine = Engine()
    engine.add(1, 2, params=limited(0))
    engine.drain()
    assert engine.tokens == {1: [], 2: []}
    assert engine.finished[1].reason == engine.finished[2].reason == "length"
    assert engine.core.stats().prompt_tokens == 3


def test_the_engine_limit_bounds_an_answer_without_max_tokens() -> None:
    engine = Engine(max_output_tokens=7)
    engine.add(1)
    engine.drain()
    assert len(engine.tokens[1]) == 7


@pytest.mark.parametrize(("params", "stop_id"), [(GREEDY, 0), (SamplingParams(temperature=0, stop_token_ids=(9,)), 9)])
def test_end_of_text_and_stop_ids_end_a_stream(params: SamplingParams, stop_id: int) -> None:
    engine = Engine(lambda state: peak(stop_id if len(state.drawn) == 3 else 5))
    engine.add(1, params=params)
    engine.drain()
    assert engine.tokens[1] == [5, 5, 5, stop_id]
    assert (engine.finished[1].reason, engine.finished[1].stop_token_id) == ("stop", stop_id)


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    engine = Engine(lambda state: peak(0 if len(state.drawn) == 2 else 5))
    engine.add(1, params=limited(3))
    engine.drain()
    assert engine.finished[1].reason == "stop"


def test_ignore_eos_goes_on_after_end_of_text() -> None:
    engine = Engine(lambda state: peak(0))
    engine.add(1, params=limited(5, ignore_eos=True))
    engine.drain()
    assert engine.tokens[1] == [0] * 5
    assert engine.finished[1].reason == "length"


def test_min_tokens_holds_off_the_stop() -> None:
    def ends_early(state: SlotState) -> torch.Tensor:
        logits = peak(0)
        logits[5] = 9.0
        return logits

    engine = Engine(ends_early)
    engine.add(1, params=limited(10, min_tokens=4))
    engine.drain()
    assert engine.tokens[1] == [5, 5, 5, 5, 0]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_abort_frees_the_slots_in_every_phase(steps: int) -> None:
    engine = Engine(num_slots=2, budget=16)
    engine.add(1, prompt=[4] * 60, params=limited(50))
    engine.add(2, 3, prompt=[4] * 60, params=limited(50))
    engine.step(steps)
    engine.core.abort(AbortRequest((1, 2, 3, 77)))
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
    before = {stream_id: list(tokens) for stream_id, tokens in engine.tokens.items()}
    engine.drain()
    assert engine.tokens == before
    engine.add(4, 5, params=limited(1))
    engine.drain()
    assert set(engine.finished) >= {4, 5}


def test_aborting_one_choice_while_its_prompt_is_read_leaves_the_others() -> None:
    engine = Engine(num_slots=3, budget=16)
    engine.add(1, 2, 3, prompt=list(range(1, 41)), params=limited(2))
    engine.step()
    engine.core.abort(AbortRequest((1,)))
    engine.drain()
    assert engine.tokens == {1: [], 2: [1, 2], 3: [1, 2]}
    assert engine.core.stats().num_running == 0


def test_aborting_one_waiting_choice_leaves_the_others() -> None:
    engine = Engine(num_slots=2)
    engine.add(1, 2, params=limited(3))
    engine.step()
    engine.add(3, 4, params=limited(2))
    engine.core.abort(AbortRequest((4,)))
    assert engine.core.stats().num_waiting == 1
    engine.drain()
    assert engine.tokens[3] == [5, 6]
    assert engine.tokens[4] == []


def test_random_arrivals_and_aborts_never_lose_a_slot() -> None:
    rng = random.Random(3)
    engine = Engine(num_slots=6, budget=24)
    alive: set[int] = set()
    for next_id in range(0, 3000, 3):
        ids = range(next_id, next_id + rng.randrange(1, 4))
        engine.add(*ids, prompt=[1 + rng.randrange(90)] * rng.randrange(1, 60), params=limited(rng.randrange(0, 6)))
        alive.update(ids)
        if rng.random() < 0.4:
            engine.core.abort(AbortRequest(tuple(rng.sample(sorted(alive), min(3, len(alive))))))
        if engine.core.has_work:
            engine.step()
        alive -= set(engine.finished)
    engine.drain(20_000)
    assert engine.is_idle
    engine.add(*range(10_000, 10_006), params=limited(1))
    engine.step()
    assert all(stream_id in engine.finished for stream_id in range(10_000, 10_006))


def test_the_next_user_of_a_slot_starts_with_its_own_parameters() -> None:
    engine = Engine(lambda state: torch.zeros(VOCAB), num_slots=1)
    engine.add(1, params=limited(5, frequency_penalty=2.0))
    engine.drain()
    engine.add(2, params=limited(3, frequency_penalty=2.0))
    engine.drain()
    assert engine.tokens == {1: [0], 2: [0]}


def test_counts_are_forgotten_with_the_request() -> None:
    engine = Engine(lambda state: torch.zeros(VOCAB), num_slots=1)
    for stream_id in (1, 2):
        engine.add(stream_id, params=limited(4, frequency_penalty=2.0, ignore_eos=True))
        engine.drain()
    assert engine.tokens[1] == engine.tokens[2] == [0, 1, 2, 3]


def test_a_row_that_is_not_finite_ends_alone() -> None:
    def script(state: SlotState) -> torch.Tensor:
        logits = peak(8)
        if state.stream_id == 3 and len(state.drawn) >= 5:
            logits[2] = torch.nan
        return logits

    engine = Engine(script, num_slots=8)
    engine.add(*range(8), params=limited(12, logprobs=0))
    engine.drain()
    assert engine.finished[3].reason == "error"
    assert "not finite" in (engine.finished[3].error or "")
    assert engine.tokens[3] == [8] * 5
    assert all(engine.tokens[i] == [8] * 12 for i in range(8) if i != 3)
    assert all(len(output.logprobs) == len(output.token_ids) // 4 for output in engine.outputs)
    engine.add(20, params=limited(2))
    engine.drain()
    assert engine.tokens[20] == [8, 8]


def test_a_step_of_prompts_that_are_not_read_to_their_end_draws_nothing() -> None:
    engine = Engine(budget=16)
    engine.add(1, prompt=[4] * 100, params=limited(1))
    engine.step(3)
    assert all(not output.stream_ids and not output.finished for output in engine.outputs)
    assert engine.core.stats().prompt_tokens == 48


def test_a_prompt_without_a_token_is_refused() -> None:
    engine = Engine()
    with pytest.raises(InvalidRequestError, match="at least one token"):
        engine.add(1, prompt=[])
    assert engine.is_idle


class RestlessPacer(Pacer):
    """Lets as many streams sit out as may."""

    def choose(self, num_decoding: int, num_wanted: int, max_resting: int) -> Share:
        return Share(min(num_wanted, self.budget - num_decoding), max_resting)


def test_no_stream_sits_out_again_soon_when_most_others_have_left() -> None:
    engine = Engine(num_slots=65, budget=66)
    engine.core.scheduler._pacer = RestlessPacer(65, 66, 4)
    for stream_id in range(64):
        engine.add(stream_id, params=limited(40 if stream_id < 10 else 10))
    engine.step(5)
    engine.add(99, prompt=[1] * 2000, params=limited(1))
    engine.drain()
    sat_out = steps_sat_out(engine.runner.steps)
    assert all(later - earlier >= REST_STEPS for numbers in sat_out.values() for earlier, later in pairwise(numbers))
    assert any(len(numbers) > 1 for numbers in sat_out.values())
    assert len(engine.tokens[0]) == 40


def test_an_engine_without_work_gives_an_empty_output() -> None:
    engine = Engine()
    engine.step()
    assert engine.outputs[0].stream_ids == b""
    assert engine.runner.steps == []
