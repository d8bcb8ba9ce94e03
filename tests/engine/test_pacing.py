"""How prompts are cut and streams sit out so that all keep their pace, on a simulated device with costs like a card's."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import pytest
from simulated import Arrival, Simulation, longest_gap, measured, steps_sat_out

from albatross.engine.pacing import MIN_CHUNK, RESTING_SHARE, Pacer, StepTimes, Timing
from albatross.engine.scheduler import OLDEST_SHARE, REST_STEPS

TILE = 128
SLOTS = 72
BUDGET = 4096
FORGOTTEN = 128  # steps after which what was measured in other times plays no part
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]


def card(size: int, rows: int) -> float:
    """Like 7.2B on an H200: the larger of the time of weights and states, and of products in tiles."""
    return max(3.3e-3 + 36e-6 * rows, 22e-6 * TILE * ceil(size / TILE))


def stairs(size: int, rows: int) -> float:
    """9 ms at 256 rows and 40 % more from there on."""
    return 1.8e-3 + 3.6e-3 * ceil(size / TILE)


NORMAL_S = card(64, 64)


def undisturbed_s(prompt_length: int) -> float:
    simulation = Simulation(card, SLOTS)
    prompt = simulation.add(prompt_length, 1)
    simulation.run_until(prompt)
    return prompt.first_token_s


def sizes_of_chunks(simulation: Simulation, since: int) -> list[int]:
    """Tokens of the steps with prompts from a step on."""
    return [step.num_tokens for step in simulation.runner.steps[since:] if step.chunks]


TIMINGS = pytest.mark.parametrize("timings", [measured(card, SLOTS, BUDGET), []], ids=["measured", "unknown"])


@TIMINGS
def test_a_long_prompt_opens_no_gap_of_five_steps_and_keeps_its_speed(timings: Sequence[Timing]) -> None:
    simulation = Simulation(card, SLOTS, timings=timings)
    streams = simulation.warm(64)
    since = simulation.clock.now
    prompt = simulation.add(32_768, 1)
    simulation.run_until(prompt)
    assert longest_gap(streams, since) < 5 * NORMAL_S
    assert prompt.first_token_s < undisturbed_s(32_768) / 0.6


@TIMINGS
@pytest.mark.parametrize("interval_s", [0.05, 0.2])
def test_prompts_of_512_tokens_get_their_first_token_within_60_ms(timings: Sequence[Timing], interval_s: float) -> None:
    simulation = Simulation(card, SLOTS, timings=timings)
    streams = simulation.warm(64)
    since = simulation.clock.now
    short = [Arrival(since + 0.013 + interval_s * i, 512, 1) for i in range(20)]
    long = Arrival(since + 0.3, 32_768, 1)
    simulation.play([*short, long])
    beside = [each for each in short if long.at < each.at < long.times[0]]
    assert len(beside) >= 4
    for group in (short, beside):
        assert statistics.mean(each.first_token_s for each in group) < 0.06
    assert longest_gap(streams, since) < 5 * NORMAL_S


def continuous_share(num_rows: int, **settings: float) -> tuple[float, Simulation]:
    """Tokens a second while 5-token prompts with 400 tokens each come and go, as a share of the bare decode step's."""
    simulation = Simulation(stairs, num_rows, timings=measured(stairs, num_rows, BUDGET), **settings)
    for i in range(num_rows):
        simulation.add(5, 1 + 400 * (i + 1) // num_rows)
    for _ in range(100):
        for _ in simulation.step():
            simulation.add(5, 400)
    started, num_drawn = simulation.clock.now, simulation.num_drawn
    for _ in range(1200):
        for _ in simulation.step():
            simulation.add(5, 400)
    rate = (simulation.num_drawn - num_drawn) / (simulation.clock.now - started)
    return rate * stairs(num_rows, num_rows) / num_rows, simulation


@pytest.mark.parametrize("num_rows", [128, 256])
def test_continuous_arrivals_cost_at_most_five_percent(num_rows: int) -> None:
    share, simulation = continuous_share(num_rows)
    assert share >= 0.95
    ended = [arrival for arrival in simulation.streams.values() if arrival.is_finished]
    assert len(ended) > num_rows
    assert all(len(arrival.times) == arrival.max_tokens for arrival in ended)


def test_without_a_pace_the_same_arrivals_cost_a_fifth() -> None:
    share, simulation = continuous_share(256, prefill_pace=0)
    assert share < 0.85
    assert not any(steps_sat_out(simulation.runner.steps).values())


def test_streams_sit_out_in_turns() -> None:
    _, simulation = continuous_share(256)
    steps = simulation.runner.steps
    sat_out = steps_sat_out(steps)
    assert sum(map(len, sat_out.values())) > 1000
    for numbers in sat_out.values():
        assert all(later - earlier >= REST_STEPS for earlier, later in pairwise(numbers))
    for number, step in enumerate(steps):
        resting = sum(number in numbers for numbers in sat_out.values())
        assert resting * RESTING_SHARE <= step.num_decoding + resting
    assert longest_gap(simulation.streams.values(), 0.2) < 5 * stairs(256, 256)


def test_no_stream_sits_out_where_growing_is_as_good() -> None:
    simulation = Simulation(card, SLOTS, timings=measured(card, SLOTS, BUDGET))
    simulation.warm(64)
    for _ in range(100):
        simulation.run_until(simulation.add(5, 1))
    settled = simulation.runner.steps[20:]  # until then the card's first values, in which rows are padding, are put right
    assert sum(bool(step.chunks) for step in settled) > 80
    assert not any(steps_sat_out(settled).values())


def test_a_prompt_moves_on_however_dear_its_tokens_are() -> None:
    def dear(size: int, rows: int) -> float:
        return 1e-3 * size**2

    simulation = Simulation(dear, SLOTS)
    simulation.warm(8)
    before = len(simulation.runner.steps)
    simulation.run_until(simulation.add(1600, 1))
    num_steps = len(simulation.runner.steps) - before
    assert num_steps <= (1600 / MIN_CHUNK) * (1 + 1 / 4) + 2


def test_a_long_prompt_keeps_its_share_while_short_ones_arrive_for_ever() -> None:
    simulation = Simulation(card, 80, timings=measured(card, 80, BUDGET))
    simulation.warm(64)
    long = simulation.add(32_768, 1)
    started = simulation.clock.now
    while not long.is_finished:
        for _ in range(2):
            simulation.add(512, 1)
        simulation.step()
    assert simulation.clock.now - started < (OLDEST_SHARE + 1) * undisturbed_s(32_768)


def test_a_short_prompt_behind_many_long_ones_is_read_within_a_few_steps() -> None:
    simulation = Simulation(card, SLOTS + 8, timings=measured(card, SLOTS + 8, BUDGET))
    simulation.warm(64)
    for _ in range(8):
        simulation.add(32_768, 1)
    for _ in range(10):
        simulation.step()
    short = simulation.add(512, 1)
    simulation.run_until(short, most=4)


@pytest.mark.parametrize(("decode", "mixed"), [(0.2, 0.2), (20, 20), (1, 20), (1, 0.1), (20, 1), (0.1, 1)])
def test_wrong_first_values_are_corrected_within_a_few_steps(decode: float, mixed: float) -> None:
    timings = [
        timing._replace(seconds=timing.seconds * (mixed if timing.is_mixed else decode))
        for timing in measured(card, SLOTS, BUDGET)
    ]
    simulation = Simulation(card, SLOTS, timings=timings)
    streams = simulation.warm(64)
    prompt = simulation.add(65_536, 1)
    for _ in range(10):
        simulation.step()
    since, num_steps = simulation.clock.now, len(simulation.runner.steps)
    simulation.run_until(prompt)
    assert longest_gap(streams, since + 5 * NORMAL_S) < 5 * NORMAL_S
    assert statistics.mean(sizes_of_chunks(simulation, num_steps)[:-1]) > 700


@TIMINGS
@pytest.mark.parametrize("every", [5, 20])
def test_hiccups_leave_the_chunks_as_they_are(timings: Sequence[Timing], every: int) -> None:
    simulation = Simulation(card, SLOTS, timings=timings)
    simulation.warm(64)
    since = len(simulation.runner.steps)
    simulation.runner.slow = dict.fromkeys(range(since, since + 1000, every), 10.0)
    simulation.run_until(simulation.add(65_536, 1))
    assert statistics.mean(sizes_of_chunks(simulation, since)[:-1]) > 700


def test_a_slow_spell_is_forgotten() -> None:
    simulation = Simulation(card, SLOTS, timings=measured(card, SLOTS, BUDGET))
    simulation.warm(64)
    since = len(simulation.runner.steps)
    simulation.runner.slow = dict.fromkeys(range(since + 5, since + 55), 10.0)
    simulation.run_until(simulation.add(200_000, 1))
    assert statistics.mean(sizes_of_chunks(simulation, since + 55 + FORGOTTEN)[:-1]) > 700


def test_a_device_that_becomes_slower_for_good_is_followed() -> None:
    simulation = Simulation(card, SLOTS, timings=measured(card, SLOTS, BUDGET))
    streams = simulation.warm(64)
    since = len(simulation.runner.steps)
    simulation.runner.slow = dict.fromkeys(range(since, since + 1000), 3.0)
    prompt = simulation.add(100_000, 1)
    for _ in range(FORGOTTEN):
        simulation.step()
    settled = simulation.clock.now
    simulation.run_until(prompt)
    assert longest_gap(streams, settled + 15 * NORMAL_S) < 15 * NORMAL_S
    assert statistics.mean(sizes_of_chunks(simulation, since + FORGOTTEN)[:-1]) > 600


def test_nothing_but_the_budget_bounds_a_prompt_beside_which_nothing_runs() -> None:
    simulation = Simulation(card, SLOTS, timings=measured(card, SLOTS, BUDGET))
    simulation.run_until(simulation.add(32_768, 1))
    assert [step.num_tokens for step in simulation.runner.steps] == [BUDGET] * (32_768 // BUDGET)


def test_pace_zero_reads_as_much_as_the_budget_holds() -> None:
    simulation = Simulation(card, SLOTS, timings=measured(card, SLOTS, BUDGET), prefill_pace=0)
    simulation.warm(64)
    since = len(simulation.runner.steps)
    simulation.run_until(simulation.add(32_768, 1))
    assert set(sizes_of_chunks(simulation, since)[:-1]) == {BUDGET}


def times_of(**kinds: dict[int, float]) -> StepTimes:
    """Each size measured twice."""
    times = StepTimes(SIZES, SIZES)
    for kind, values in kinds.items():
        for size, seconds in values.items():
            for _ in range(2):
                times.observe(kind == "mixed", size, seconds)
    return times


def test_before_anything_was_measured_every_size_is_worth_a_try() -> None:
    times = StepTimes(SIZES, SIZES)
    assert times.decode(64) == 0
    assert dict(times.mixed(1)) == dict.fromkeys(SIZES, 0.0)
    assert Pacer(SLOTS, BUDGET, 4).choose(0, 5000, 0).num_tokens == BUDGET


def test_what_lies_between_two_measured_sizes_never_falls() -> None:
    times = times_of(decode={1: 3.0, 64: 5.0}, mixed={256: 9.0, 1024: 8.5, 2048: 40.0})
    found = [seconds for size, seconds in times.mixed(1) if size != 1024]
    assert found == sorted(found)
    assert [times.decode(rows) for rows in (1, 30, 64, 100)] == [3.0, pytest.approx(3.98, abs=0.01), 5.0, 5.0]


def test_beyond_what_was_measured_time_is_taken_to_grow_with_the_size() -> None:
    assert dict(times_of(decode={64: 5.0}).mixed(64)) == {64: 5, 128: 10, 256: 20, 512: 40, 1024: 80, 2048: 160}


def test_a_hiccup_neither_counts_itself_nor_for_smaller_sizes() -> None:
    times = times_of(decode={64: 5.0}, mixed={512: 12.0})
    times.observe(True, 1024, 900.0)
    times.observe(True, 512, 900.0)
    found = dict(times.mixed(64))
    assert found[512] == 12.0
    assert found[256] < 12.0
    assert found[1024] == 24.0
    times = times_of(decode={64: 5.0}, mixed={512: 12.0})
    times.expect([Timing(True, 1024, 23.0)])
    times.observe(True, 1024, 900.0)
    assert dict(times.mixed(64))[1024] == 23.0
    times.observe(True, 1024, 24.0)
    assert dict(times.mixed(64))[1024] == 24.0


def pacer_with(**kinds: dict[int, float]) -> Pacer:
    pacer = Pacer(64, BUDGET, 4)
    pacer.times = times_of(**kinds)
    return pacer


def test_of_sizes_that_read_about_as_fast_the_one_with_more_of_the_prompt_is_taken() -> None:
    pacer = pacer_with(decode={64: 6.0}, mixed={256: 6.0, 512: 10.0, 1024: 20.4, 2048: 40.0})
    assert pacer.choose(64, 5000, 0).num_tokens == 960


def test_rows_rest_only_in_a_step_that_leaves_half_of_their_gap() -> None:
    assert pacer_with(decode={16: 1.0}, mixed={16: 1.9, 32: 3.9}).choose(16, 2, 2).num_resting == 2
    assert pacer_with(decode={16: 1.0}, mixed={16: 2.1, 32: 3.9}).choose(16, 2, 2).num_resting == 0


def test_after_a_step_that_rows_sat_out_the_next_one_is_the_shorter() -> None:
    pacer = pacer_with(decode={16: 1.0}, mixed={16: 1.0, 32: 1.9, 64: 2.9, 128: 3.9, 256: 8.0})
    assert pacer.choose(16, 5000, 2).num_tokens == 128 - 16
    assert pacer.choose(16, 2, 2).num_resting == 2
    assert pacer.choose(16, 5000, 2).num_tokens == 64 - 16
    assert pacer.choose(16, 5000, 2).num_tokens == 128 - 16
