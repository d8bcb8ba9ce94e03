"""The sampling law, row by row, on logits made by hand."""

import math
from array import array

import numpy as np
import pytest
import torch
from scripted import GREEDY

from albatross.engine import rng
from albatross.engine.request import Request, Stream
from albatross.engine.sampler import Sampler
from albatross.sampling_params import SamplingParams

V = 1000


class Bench:
    """One sampler; slot i runs params[i]."""

    def __init__(self, *params: SamplingParams, prompt: tuple[int, ...] = (5, 5, 7), vocab_size: int = V) -> None:
        self.sampler = Sampler(len(params), vocab_size, torch.device("cpu"))
        self.count = len(params)
        for slot, each in enumerate(params):
            request = Request([Stream(slot, 0, slot=slot)], array("I", prompt), each, each.seed or 0, 10, 0)
            self.sampler.assign(request)

    def draw(self, logits: torch.Tensor, position: int = 0) -> list[int]:
        return self.sampler.sample(logits, list(range(self.count)), [position] * self.count).token_ids


def draws(params: SamplingParams, logits: torch.Tensor, number: int = 4000) -> torch.Tensor:
    """Frequencies of the ids over many positions of one request."""
    return torch.bincount(torch.tensor(positions(params, logits, number)), minlength=len(logits)) / number


def positions(params: SamplingParams, logits: torch.Tensor, number: int) -> list[int]:
    """What one request draws from the same logits at positions 0, 1, 2, ..."""
    sampler = Bench(params, vocab_size=len(logits)).sampler
    return sampler.sample(logits.expand(number, -1), [0] * number, list(range(number))).token_ids


def test_philox_gives_the_published_words() -> None:
    zero, ones = np.zeros(1, np.uint64), np.full(1, 2**32 - 1, np.uint64)
    words = rng.philox(zero, (zero, zero, zero, zero))
    assert [int(w[0]) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = rng.philox(np.full(1, 2**64 - 1, np.uint64), (ones, ones, ones, ones))
    assert [int(w[0]) for w in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_uniform_numbers_lie_inside_the_unit_interval_and_spread() -> None:
    positions = np.arange(20_000, dtype=np.uint64)
    numbers = rng.uniform(np.full_like(positions, 7), np.zeros_like(positions), positions)
    assert 0 < numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert len(np.unique(numbers)) > 19_900


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0), SamplingParams(top_k=1)])
def test_greedy_takes_the_lowest_of_equal_maxima(params: SamplingParams) -> None:
    logits = torch.zeros(1, V)
    logits[0, [41, 17, 900]] = 3.0
    assert all(Bench(params).draw(logits, position) == [17] for position in range(100))


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    assert torch.allclose(draws(SamplingParams(seed=3), logits), logits.softmax(0), atol=0.03)
    assert torch.allclose(draws(SamplingParams(seed=3, temperature=0.5), logits), (logits / 0.5).softmax(0), atol=0.03)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_k=-1), {0, 1, 2, 3}),
        (SamplingParams(top_p=0.5), {0}),
        (SamplingParams(top_p=0.51), {0, 1}),
        (SamplingParams(top_p=0.81), {0, 1, 2}),
        (SamplingParams(min_p=0.35), {0, 1}),
        (SamplingParams(top_k=3, top_p=0.6), {0, 1}),
        (SamplingParams(top_k=1000), {0, 1, 2, 3}),
        (SamplingParams(top_p=1e-9), {0}),
    ],
)
def test_limits_keep_the_likeliest(params: SamplingParams, kept: set[int]) -> None:
    probs = torch.tensor([0.5, 0.25, 0.1667, 0.0833])
    found = draws(params, probs.log(), 600)
    assert {i for i in range(4) if found[i] > 0} == kept


def test_top_p_counts_only_what_top_k_left() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    found = draws(SamplingParams(top_k=2, top_p=0.58), probs.log(), 600)
    assert {i for i in range(4) if found[i] > 0} == {0, 1}
    found = draws(SamplingParams(top_k=2, top_p=0.57), probs.log(), 600)
    assert {i for i in range(4) if found[i] > 0} == {0}


def test_ids_tied_with_the_last_that_stays_stay() -> None:
    found = draws(SamplingParams(top_k=2), torch.tensor([2.0, 1.0, 1.0, 0.0]), 600)
    assert {i for i in range(4) if found[i] > 0} == {0, 1, 2}


def test_a_flat_distribution_over_a_large_vocabulary_is_cut_exactly() -> None:
    logits = torch.linspace(0, 1e-3, V)
    drawn = positions(SamplingParams(top_p=0.5), logits, 300)
    assert min(drawn) >= 0.49 * V
    assert min(drawn) < 0.53 * V
    drawn = positions(SamplingParams(top_k=700), logits, 300)
    assert 300 <= min(drawn) < 320


def test_classic_order_applies_top_p_before_the_temperature() -> None:
    logits = torch.tensor([0.6, 0.25, 0.15]).log()
    hot = SamplingParams(temperature=2.0, top_p=0.5)
    found = draws(hot, logits, 600)
    assert found[1] > 0
    classic = SamplingParams(temperature=2.0, top_p=0.5, sampler_order="rwkv-classic")
    found = draws(classic, logits, 600)
    assert found[0] == 1
    classic = SamplingParams(temperature=0.5, top_p=0.8, sampler_order="rwkv-classic")
    expected = torch.tensor([0.6**2, 0.25**2]) / (0.6**2 + 0.25**2)
    assert torch.allclose(draws(classic, logits)[:2], expected, atol=0.03)


def test_presence_and_frequency_follow_the_formula() -> None:
    sampler = Bench(SamplingParams(presence_penalty=0.5, frequency_penalty=0.2)).sampler
    flat = torch.zeros(1, V)
    five = torch.tensor([5])
    for _ in range(3):
        sampler._penalties.count([0], five, torch.ones(1, 1))
    adjusted = sampler._adjust(flat, [0], [3])
    assert adjusted[0, 5].item() == pytest.approx(-1.1, abs=1e-6)
    assert adjusted[0, 6].item() == 0


def test_counts_decay_once_a_step_and_presence_does_not() -> None:
    decay = 0.996
    sampler = Bench(SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, penalty_decay=decay)).sampler
    for token_id in (5, 5, 5, 8, 8):
        sampler._penalties.count([0], torch.tensor([token_id]), torch.full((1, 1), decay))
    adjusted = sampler._adjust(torch.zeros(1, V), [0], [5])
    count = decay**2 + decay**3 + decay**4
    assert adjusted[0, 5].item() == pytest.approx(-(0.5 + 0.2 * count), abs=1e-6)
    assert adjusted[0, 8].item() == pytest.approx(-(0.5 + 0.2 * (1 + decay)), abs=1e-6)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    sampler = Bench(SamplingParams(repetition_penalty=2.0)).sampler
    for token_id in (1, 2):
        sampler._penalties.count([0], torch.tensor([token_id]), torch.ones(1, 1))
    logits = torch.full((1, V), -3.0)
    logits[0, 1] = 4.0
    adjusted = sampler._adjust(logits, [0], [2])
    assert adjusted[0, :4].tolist() == [-3.0, 2.0, -6.0, -3.0]


def test_the_prompt_counts_only_when_asked() -> None:
    flat = torch.zeros(1, V)
    free = Bench(SamplingParams(frequency_penalty=0.5)).sampler._adjust(flat, [0], [0])
    assert free[0, 5].item() == 0
    held = Bench(SamplingParams(frequency_penalty=0.5, penalize_prompt=True)).sampler._adjust(flat, [0], [0])
    assert held[0, [5, 7, 9]].tolist() == [-1.0, -0.5, 0.0]


def test_bias_and_bans_change_what_is_drawn() -> None:
    logits = torch.zeros(3, V)
    logits[:, 4] = 5.0
    bench = Bench(
        SamplingParams(temperature=0, logit_bias={9: 6.0}),
        SamplingParams(temperature=0, banned_token_ids=(4, 0, 1)),
        GREEDY,
    )
    assert bench.draw(logits) == [9, 2, 4]


def test_ids_without_an_entry_are_never_drawn() -> None:
    logits = torch.zeros(2, V)
    logits[:, 998] = 50.0
    logits[:, 12] = 49.0
    bench = Bench(GREEDY, SamplingParams(seed=1, logit_bias={998: 100.0}))
    bench.sampler.forbid([998, 999])
    for position in range(50):
        greedy, drawn = bench.draw(logits, position)
        assert greedy == 12
        assert drawn != 998


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    kinds = [
        SamplingParams(seed=11), SamplingParams(seed=11, top_p=0.9), SamplingParams(seed=12, top_k=40, temperature=1.3),
        SamplingParams(seed=11, presence_penalty=1.0), GREEDY, SamplingParams(seed=5, min_p=0.01),
    ]  # fmt: skip
    logits = torch.randn(len(kinds), V, generator=torch.Generator().manual_seed(0)) * 3
    together = Bench(*kinds)
    for position in range(30):
        expected = [Bench(kind).draw(logits[i : i + 1], position)[0] for i, kind in enumerate(kinds)]
        got = Bench(*kinds).draw(logits, position)
        assert got == expected
    assert len({tuple(together.draw(logits, position)) for position in range(30)}) > 20


def test_choices_and_seeds_draw_differently() -> None:
    logits = torch.zeros(1, V)
    streams = [Stream(0, 0, slot=0), Stream(1, 1, slot=1)]
    sampler = Sampler(3, V, torch.device("cpu"))
    sampler.assign(Request(streams, array("I", [1]), SamplingParams(seed=1), 1, 9, 0))
    sampler.assign(Request([Stream(2, 0, slot=2)], array("I", [1]), SamplingParams(seed=2), 2, 9, 0))
    drawn = [sampler.sample(logits.expand(3, V), [0, 1, 2], [p] * 3).token_ids for p in range(20)]
    columns = list(zip(*drawn, strict=True))
    assert len(set(columns)) == 3


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    bench = Bench(SamplingParams(temperature=0, logit_bias={3: 50.0}, logprobs=2), vocab_size=4)
    samples = bench.sampler.sample(logits, [0], [0])
    raw = logits.log_softmax(-1)[0]
    assert samples.token_ids == [3]
    assert samples.logprobs[0].logprob == pytest.approx(raw[3].item())
    assert samples.logprobs[0].top_ids == (1, 2)
    assert samples.logprobs[0].top_logprobs == pytest.approx((raw[1].item(), raw[2].item()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_marked_and_neighbours_are_not(value: float) -> None:
    logits = torch.zeros(3, V)
    logits[:, 6] = 4.0
    expected = Bench(GREEDY, SamplingParams(seed=1), SamplingParams(seed=2)).draw(logits.clone())
    logits[1, 3] = value
    samples = Bench(GREEDY, SamplingParams(seed=1), SamplingParams(seed=2)).sampler.sample(logits, [0, 1, 2], [0, 0, 0])
    assert samples.is_bad == [False, True, False]
    assert [samples.token_ids[0], samples.token_ids[2]] == [expected[0], expected[2]]
