"""Running ahead: what it costs, and that it changes no token of any stream and loses no slot, whatever comes, goes and stops."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import NOT_FINITE, VOCAB, Engine, SlotState, peak

from albatross.engine.messages import AbortRequest
from albatross.sampling_params import SamplingParams

NUM_SLOTS = 3
DEPTHS = pytest.mark.parametrize("run_ahead", [0, 1])
Scenario = tuple[list[dict[str, Any]], dict[int, int]]


def limited(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


@DEPTHS
def test_a_step_is_launched_while_the_one_before_it_runs(run_ahead: int) -> None:
    engine = Engine(num_slots=2, run_ahead=run_ahead)
    engine.add(1, params=limited(20))
    engine.add(2, params=limited(5))
    engine.drain()
    assert engine.runner.most_in_flight == run_ahead + 1


def test_a_known_length_costs_no_row_too_many() -> None:
    engine = Engine(num_slots=2, run_ahead=1)
    for stream_id in range(6):
        engine.add(stream_id, params=limited(1 + stream_id))
    engine.drain()
    assert engine.core.stats().discarded_tokens == 0
    assert sum(len(step.draws) for step in engine.runner.steps) == 21


@DEPTHS
def test_a_stop_costs_one_row_for_each_step_run_ahead(run_ahead: int) -> None:
    engine = Engine(lambda state: peak(0 if len(state.drawn) == 3 else 5), run_ahead=run_ahead)
    engine.add(1, 2, params=limited(10))
    engine.drain()
    assert engine.tokens == {1: [5, 5, 5, 0], 2: [5, 5, 5, 0]}
    assert engine.core.stats().discarded_tokens == 2 * run_ahead
    assert engine.core.stats().generated_tokens == 8


def test_a_slot_freed_by_a_stop_serves_the_next_request_while_its_last_row_runs() -> None:
    def script(state: SlotState) -> torch.Tensor:
        return peak(0 if state.stream_id == 1 and len(state.drawn) == 2 else state.prompt[0])

    engine = Engine(script, num_slots=1, run_ahead=1)
    engine.add(1, prompt=[5])
    engine.add(2, prompt=[6], params=limited(3))
    engine.drain()
    assert engine.tokens == {1: [5, 5, 0], 2: [6, 6, 6]}


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Requests with the step each arrives before, and for some streams the step they are aborted before."""
    requests: list[dict[str, Any]] = []
    stream_id = 0
    for _ in range(draw(st.integers(1, 8))):
        number = draw(st.integers(1, 3))
        max_tokens = draw(st.integers(0, 9))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 99)),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            frequency_penalty=draw(st.sampled_from([0.0, 1.0])),
            logprobs=draw(st.sampled_from([None, 1])),
            prompt_logprobs=draw(st.sampled_from([None, 0])),
        )
        requests.append({
            "stream_ids": tuple(range(stream_id, stream_id + number)),
            "prompt": draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=40)),
            "params": params,
            "priority": draw(st.integers(0, 1)),
            "step": draw(st.integers(0, 12)),
        })  # fmt: skip
        stream_id += number
    aborts = draw(st.dictionaries(st.integers(0, stream_id - 1), st.integers(0, 20), max_size=4))
    return requests, aborts


def hashed(state: SlotState) -> torch.Tensor:
    """Logits that depend on everything a slot has read; end of text is likely, and some streams get a NaN in time."""
    key = hash((tuple(state.prompt), tuple(state.drawn)))
    logits = peak(0 if key % 5 == 0 else key % VOCAB) / 2
    if key % 23 == 0:
        logits[1] = torch.nan
    return logits


def is_scored(request: dict[str, Any]) -> bool:
    return request["params"].prompt_logprobs is not None


def check_scores(scenario: Scenario, engine: Engine) -> None:
    """Every stream that asked has the scores of its whole prompt, or of its beginning if it was ended before."""
    requests, aborts = scenario
    for request in requests:
        targets = request["prompt"][1:] if is_scored(request) else []
        for stream_id in request["stream_ids"]:
            scored = engine.scored[stream_id]
            assert scored == targets[: len(scored)]
            if NOT_FINITE in targets:
                assert NOT_FINITE not in scored
                assert stream_id in aborts or engine.finished[stream_id].reason == "error"
            elif stream_id not in aborts:
                assert scored == targets


def play(scenario: Scenario, run_ahead: int) -> Engine:
    requests, aborts = scenario
    engine = Engine(hashed, num_slots=NUM_SLOTS, budget=24, run_ahead=run_ahead)
    for step in range(21):
        for request in requests:
            if request["step"] == step:
                fields = {name: request[name] for name in ("prompt", "params", "priority")}
                engine.add(*request["stream_ids"], **fields)
        engine.core.abort(AbortRequest(tuple(stream_id for stream_id, when in aborts.items() if when == step)))
        engine.step()
    engine.drain()
    return engine


@given(scenarios())
@settings(max_examples=80, deadline=None)
def test_running_ahead_changes_no_token_and_loses_no_slot(scenario: Scenario) -> None:
    engines = [play(scenario, run_ahead) for run_ahead in (0, 1)]
    aborted = set(scenario[1])
    for stream_id, tokens in engines[0].tokens.items():
        others = engines[1].tokens[stream_id]
        if stream_id in aborted:
            shorter = min(len(tokens), len(others))
            assert tokens[:shorter] == others[:shorter]
        else:
            assert tokens == others
            assert engines[0].finished[stream_id] == engines[1].finished[stream_id]
    early = sum(finish.reason in ("stop", "error") for finish in engines[1].finished.values())
    # The step that finds a prompt's last chunk not finite draws from it as well.
    unread = sum(len(each["stream_ids"]) for each in scenario[0] if is_scored(each) and NOT_FINITE in each["prompt"][1:])
    assert engines[0].core.stats().discarded_tokens <= unread
    assert engines[1].core.stats().discarded_tokens <= early + len(aborted) + unread
    for engine in engines:
        check_scores(scenario, engine)
        assert engine.is_idle
        engine.add(*range(1000, 1000 + NUM_SLOTS), params=limited(1))
        engine.step()
        assert len(engine.runner.steps[-1].draws) == NUM_SLOTS
