"""The sampling law as a request sees it, on logits made by hand: drawn by a `Sampler` on the CPU."""

import math
from array import array

import msgspec
import pytest
import torch
from scripted import GREEDY

from albatross.constants import MAX_EDITED_IDS
from albatross.engine.request import Request, Stream
from albatross.engine.sampler import Sampler, Samples
from albatross.errors import InvalidRequestError
from albatross.sampling_params import SamplingParams

V = 1000
CPU = torch.device("cpu")


class Bench:
    """One sampler; slot i runs params[i]."""

    def __init__(self, *params: SamplingParams, prompt: tuple[int, ...] = (5, 5, 7), vocab_size: int = V) -> None:
        self.sampler = Sampler(len(params), vocab_size, CPU, "reference")
        self.slots = list(range(len(params)))
        for slot, each in enumerate(params):
            self.sampler.assign(Request([Stream(slot, 0, slot=slot)], array("I", prompt), each, each.seed or 0, 10, 0))

    def sample(self, logits: torch.Tensor) -> Samples:
        self.sampler.draw(logits, torch.tensor(self.slots, dtype=torch.int32))
        return self.sampler.collect(logits, self.slots).wait()

    def draw(self, logits: torch.Tensor, position: int | None = None) -> list[int]:
        if position is not None:
            self.sampler.position[:] = position
        return self.sample(logits).token_ids


def draws(params: SamplingParams, logits: torch.Tensor, number: int = 4000) -> torch.Tensor:
    """Frequencies of the ids over many positions of one request."""
    return torch.bincount(torch.tensor(positions(params, logits, number)), minlength=len(logits)) / number


def positions(params: SamplingParams, logits: torch.Tensor, number: int) -> list[int]:
    """What one request draws from the same logits at positions 0, 1, 2, ..."""
    bench = Bench(*[params] * number, vocab_size=len(logits))
    bench.sampler.position[:] = torch.arange(number)
    return bench.draw(logits.expand(number, -1))


def adjusted(params: SamplingParams, history: list[int], token_id: int, logit: float = 0.0) -> float:
    """The logit of an id after a request drew `history`, found by the rival that draws level with it."""
    low, high = -100.0, 100.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        bench = Bench(msgspec.structs.replace(params, temperature=0))
        for drawn in history:
            assert bench.draw(peaks({drawn: 90.0})) == [drawn]
        wins = bench.draw(peaks({token_id: logit, V - 1: middle})) == [token_id]
        low, high = (middle, high) if wins else (low, middle)
    return low


def peaks(logits: dict[int, float]) -> torch.Tensor:
    """Logits [1, V], far below all others but where they are given."""
    row = torch.full((1, V), -100.0)
    for token_id, value in logits.items():
        row[0, token_id] = value
    return row


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
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.2)
    assert adjusted(params, [5, 5, 5], 5) == pytest.approx(-1.1, abs=1e-3)
    assert adjusted(params, [5, 5, 5], 6) == pytest.approx(0, abs=1e-3)


def test_counts_decay_once_a_step_and_presence_does_not() -> None:
    decay = 0.6
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, penalty_decay=decay)
    count = decay**2 + decay**3 + decay**4
    assert adjusted(params, [5, 5, 5, 8, 8], 5) == pytest.approx(-(0.5 + 0.2 * count), abs=1e-3)
    assert adjusted(params, [5, 5, 5, 8, 8], 8) == pytest.approx(-(0.5 + 0.2 * (1 + decay)), abs=1e-3)


@pytest.mark.parametrize("decay", [0.0, 1e-9])
def test_presence_outlives_a_count_that_has_decayed_to_nothing(decay: float) -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, penalty_decay=decay)
    assert adjusted(params, [5, *[8] * 20], 5) == pytest.approx(-0.5, abs=1e-3)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    assert adjusted(params, [1, 2], 1, logit=4.0) == pytest.approx(2, abs=1e-3)
    assert adjusted(params, [1, 2], 2, logit=-3.0) == pytest.approx(-6, abs=1e-3)
    assert adjusted(params, [1, 2], 3, logit=-3.0) == pytest.approx(-3, abs=1e-3)


def test_the_prompt_counts_only_when_asked() -> None:
    assert adjusted(SamplingParams(frequency_penalty=0.5), [], 5) == pytest.approx(0, abs=1e-3)
    asked = SamplingParams(frequency_penalty=0.5, penalize_prompt=True)
    assert [adjusted(asked, [], token_id) for token_id in (5, 7, 9)] == pytest.approx([-1, -0.5, 0], abs=1e-3)


def test_a_slots_next_request_begins_at_position_zero_with_no_counts() -> None:
    params = SamplingParams(seed=4, presence_penalty=2.0, logit_bias={3: 1.0})
    logits = torch.zeros(1, V)
    bench = Bench(params)
    first = [bench.draw(logits) for _ in range(5)]
    bench.sampler.assign(Request([Stream(9, 0, slot=0)], array("I", [1]), params, 4, 10, 0))
    assert [bench.draw(logits) for _ in range(5)] == first
    bench.sampler.assign(Request([Stream(9, 0, slot=0)], array("I", [1]), GREEDY, 4, 10, 0))
    assert bench.draw(logits) == [0]


def test_stops_cannot_be_drawn_before_min_tokens() -> None:
    bench = Bench(SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(8,)))
    logits = peaks({0: 5.0, 8: 4.0, 30: 3.0})
    assert [bench.draw(logits) for _ in range(4)] == [[30], [30], [0], [0]]


def test_more_ids_than_a_slot_holds_are_refused() -> None:
    ids = tuple(range(MAX_EDITED_IDS // 2))
    bias = dict.fromkeys(range(600, 600 + MAX_EDITED_IDS - 2 * len(ids)), 1.0)
    SamplingParams(banned_token_ids=ids, stop_token_ids=ids, logit_bias=bias)
    with pytest.raises(InvalidRequestError, match="must name at most 1024 ids together, but name 1025") as error:
        SamplingParams(banned_token_ids=(*ids, 990), stop_token_ids=ids, logit_bias=bias)
    assert error.value.param == "banned_token_ids"


def test_a_slot_takes_as_many_edits_as_a_request_may_name() -> None:
    params = SamplingParams(
        temperature=0, min_tokens=1, banned_token_ids=tuple(range(1, 901)), stop_token_ids=tuple(range(990, 1000)),
        logit_bias={900: 9.0, **dict.fromkeys(range(901, 990), 1.0)},
    )  # fmt: skip
    logits = torch.zeros(1, V)
    bench = Bench(params)
    assert [bench.draw(logits) for _ in range(2)] == [[901], [901]]


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
    for position in range(30):
        expected = [Bench(kind).draw(logits[i : i + 1], position)[0] for i, kind in enumerate(kinds)]
        assert Bench(*kinds).draw(logits, position) == expected
    together = Bench(*kinds)
    assert len({tuple(together.draw(logits)) for _ in range(30)}) > 20


def test_choices_and_seeds_draw_differently() -> None:
    logits = torch.zeros(3, V)
    streams = [Stream(0, 0, slot=0), Stream(1, 1, slot=1)]
    sampler = Sampler(3, V, CPU, "reference")
    sampler.assign(Request(streams, array("I", [1]), SamplingParams(seed=1), 1, 9, 0))
    sampler.assign(Request([Stream(2, 0, slot=2)], array("I", [1]), SamplingParams(seed=2), 2, 9, 0))
    drawn = []
    for _ in range(20):
        sampler.draw(logits, torch.tensor([0, 1, 2], dtype=torch.int32))
        drawn.append(sampler.collect(logits, [0, 1, 2]).wait().token_ids)
    columns = list(zip(*drawn, strict=True))
    assert len(set(columns)) == 3


def test_a_slots_last_token_is_what_it_drew() -> None:
    bench = Bench(GREEDY, SamplingParams(seed=3))
    drawn = bench.draw(torch.randn(2, V, generator=torch.Generator().manual_seed(1)))
    assert bench.sampler.last_token.tolist() == drawn
    assert bench.sampler.position.tolist() == [1, 1]


def test_pending_samples_are_those_of_their_own_draw() -> None:
    sampler = Bench(msgspec.structs.replace(GREEDY, logprobs=1)).sampler
    slots = torch.tensor([0], dtype=torch.int32)
    pending = []
    for token_id in (3, 4):
        logits = peaks({token_id: 5.0})
        sampler.draw(logits, slots)
        pending.append(sampler.collect(logits, [0]))
    samples = [each.wait() for each in pending]
    assert [each.token_ids for each in samples] == [[3], [4]]
    assert [each.logprobs[0].top_ids for each in samples] == [(3,), (4,)]


def test_a_step_that_draws_nothing_has_no_samples() -> None:
    assert Bench(GREEDY).sampler.collect(torch.empty(0, V), []).wait() == Samples([], [], {})


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    samples = Bench(SamplingParams(temperature=0, logit_bias={3: 50.0}, logprobs=2), vocab_size=4).sample(logits)
    raw = logits.log_softmax(-1)[0]
    assert samples.token_ids == [3]
    assert samples.logprobs[0].logprob == pytest.approx(raw[3].item())
    assert samples.logprobs[0].top_ids == (1, 2)
    assert samples.logprobs[0].top_logprobs == pytest.approx((raw[1].item(), raw[2].item()))


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    asked = [msgspec.structs.replace(GREEDY, logprobs=number) for number in (3, 0)]
    samples = Bench(GREEDY, *asked).sample(torch.arange(V).float().expand(3, V))
    assert {row: each.top_ids for row, each in samples.logprobs.items()} == {1: (V - 1, V - 2, V - 3), 2: ()}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_marked_and_neighbours_are_not(value: float) -> None:
    asked = msgspec.structs.replace(GREEDY, logprobs=1)
    params = asked, SamplingParams(seed=1, logprobs=1), SamplingParams(seed=2)
    logits = torch.zeros(3, V)
    logits[:, 6] = 4.0
    expected = Bench(*params).draw(logits)
    logits[1, 3] = value
    samples = Bench(*params).sample(logits)
    assert samples.is_bad == [False, True, False]
    assert samples.token_ids == [expected[0], 0, expected[2]]
    assert list(samples.logprobs) == [0]


def test_the_lowest_temperatures_draw_the_likeliest_id() -> None:
    logits = torch.tensor([3.0, 3.01, -300.0])
    assert set(positions(SamplingParams(temperature=1e-300), logits, 50)) == {1}
