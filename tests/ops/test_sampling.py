"""The sampling op on CPU tensors, where the reference implements it: against the float64 oracle, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sampling_cases import (
    KINDS,
    SENTINEL,
    WRONG_TABLES,
    Edges,
    Row,
    assert_drawn_as_the_oracle_draws,
    assert_frequencies_follow_the_oracle,
    bit_mask,
    fit,
    int32,
    make_logits,
    make_tables,
    outputs,
)

from albatross import ops
from albatross.ops.sampling import Field
from albatross.reference.philox import philox, uniform

SIZES = (1, 2, 5, 100, 128, 513, 1000, 4096)


def draw(rows: list[Row], logits: torch.Tensor) -> list[int]:
    """What rows draw in one call, each in a slot of its own."""
    drawn, is_bad = outputs(len(rows))
    slots = list(range(len(rows)))
    ops.sample(logits, int32(slots), make_tables(rows, slots, logits.shape[1]), drawn, is_bad)
    return drawn.tolist()


def test_philox_gives_the_published_words() -> None:
    low, high = 0, 2**32 - 1
    assert philox((low, low), (low,) * 4) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((high, high), (high,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_uniform_numbers_lie_inside_the_unit_interval_and_spread() -> None:
    numbers = [uniform((7, 0), 0, position) for position in range(20_000)]
    assert 0 < min(numbers) < max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01
    assert len(set(numbers)) > 19_900


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_every_kind_of_row_draws_what_the_oracle_draws(vocab_size: int, step: float) -> None:
    rows = [fit(row, vocab_size) for row in KINDS.values()]
    slots = torch.randperm(len(rows) + 2, generator=torch.Generator().manual_seed(2))[: len(rows)].tolist()
    logits = make_logits(len(rows), vocab_size, seed=vocab_size, step=step)
    forbidden = [vocab_size - 1] if vocab_size > 2 else []
    drawn, is_bad = outputs(len(rows))

    ops.sample(logits, int32(slots), make_tables(rows, slots, vocab_size, forbidden), drawn, is_bad)

    edges = Edges()
    assert_drawn_as_the_oracle_draws(rows, logits, drawn, is_bad, forbidden, edges)
    assert edges.found <= edges.most


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_follow_the_oracles_distribution(name: str) -> None:
    assert_frequencies_follow_the_oracle(fit(KINDS[name], 110), 3000, 110, "cpu")


def test_a_draw_moves_the_slot_on_and_counts_what_it_drew() -> None:
    row = Row(is_greedy=True, frequency=0.1, decay=0.5, position=6, counts={3: 2.0, 8: 1e-30})
    logits = torch.zeros(1, 10)
    logits[0, 3] = 9
    tables = make_tables([row], [1], 10)
    drawn, is_bad = outputs(1)
    ops.sample(logits, int32([1]), tables, drawn, is_bad)
    assert (drawn.item(), is_bad.item(), tables.last_token[1].item()) == (3, False, 3)
    assert tables.records[1, Field.POSITION] == 7
    assert tables.counts is not None
    assert tables.counts[1].tolist() == pytest.approx([0, 0, 0, 2.0, 0, 0, 0, 0, 1e-30, 0], rel=1e-6)


def test_padding_rows_and_other_slots_are_left_untouched() -> None:
    rows = [Row(presence=1.0), Row(presence=1.0)]
    tables = make_tables(rows, [2, 0], 10)
    before = replace(tables, **{name: getattr(tables, name).clone() for name in ("records", "last_token", "counts")})
    drawn, is_bad = outputs(3)
    logits = make_logits(3, 10)
    logits[1] = torch.nan  # a padding row's logits may hold anything
    ops.sample(logits, int32([2, -1, 0]), tables, drawn, is_bad)
    assert (drawn[1], bool(is_bad[1])) == (SENTINEL, True)
    assert not is_bad[[0, 2]].any()
    assert tables.counts is not None
    assert before.counts is not None
    for name in ("records", "last_token", "counts"):
        assert torch.equal(getattr(tables, name)[[1, 3]], getattr(before, name)[[1, 3]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_bad_counts_nothing_and_disturbs_no_neighbour(value: float) -> None:
    rows = [Row(), Row(presence=1.0, counts={4: 1.0}), Row(is_greedy=True)]
    logits = make_logits(3, 50)
    expected = draw(rows, logits)
    logits[1, 49] = value
    tables = make_tables(rows, [0, 1, 2], 50)
    drawn, is_bad = outputs(3)
    ops.sample(logits, int32([0, 1, 2]), tables, drawn, is_bad)
    assert is_bad.tolist() == [False, True, False]
    assert drawn.tolist() == [expected[0], 0, expected[2]]
    assert tables.counts is not None
    assert tables.counts[1].nonzero().tolist() == [[4]]


def test_a_row_with_no_id_left_is_bad() -> None:
    tables = make_tables([Row(), Row(is_greedy=True), Row()], [0, 1, 2], 40, forbidden=[3])
    allowed = torch.stack([bit_mask(ids, 40) for ids in ([3], [3], [3, 39])])
    drawn, is_bad = outputs(3)
    ops.sample(make_logits(3, 40), int32([0, 1, 2]), tables, drawn, is_bad, allowed=allowed)
    assert is_bad.tolist() == [True, True, False]
    assert drawn.tolist() == [0, 0, 39]


def test_a_grammars_mask_holds_for_its_row_alone() -> None:
    rows = [Row(seed=i) for i in range(40)]
    ids = [[1, 33, 64], [2, 31, 32]]
    allowed = torch.stack([bit_mask(ids[i % 2], 65) for i in range(40)])
    drawn, is_bad = outputs(40)
    tables = make_tables(rows, list(range(40)), 65)
    ops.sample(make_logits(40, 65, spread=0.5), int32(list(range(40))), tables, drawn, is_bad, allowed=allowed)
    assert set(drawn[0::2].tolist()) == set(ids[0])
    assert set(drawn[1::2].tolist()) == set(ids[1])


def test_the_logits_are_not_changed_and_may_be_a_view() -> None:
    rows = list(map(fit, KINDS.values(), [100] * len(KINDS)))
    logits = make_logits(len(rows), 130)[:, 7:107]
    before = logits.clone()
    assert draw(rows, logits) == draw(rows, before)
    assert torch.equal(logits, before)


def test_a_call_without_rows_changes_nothing() -> None:
    tables = make_tables([Row()], [0], 10)
    before = tables.records.clone()
    ops.sample(torch.zeros(0, 10), int32([]), tables, *outputs(0))
    assert torch.equal(tables.records, before)


@pytest.mark.parametrize("has_counts", [True, False])
def test_opcheck_accepts_the_op(has_counts: bool) -> None:
    rows = [fit(KINDS["plain"], 40), fit(KINDS["penalties"] if has_counts else KINDS["top_p"], 40), Row(is_greedy=True)]
    tables = make_tables(rows, [2, 0, 1], 40)
    counts = tables.counts if has_counts else None
    fixed = (tables.edit_ids, tables.edit_values, tables.forbidden, None, counts, tables.last_token)
    args = (make_logits(4, 40), int32([2, -1, 0, 1]), tables.records, *fixed, *outputs(4))
    torch.library.opcheck(torch.ops.albatross.sample.default, args)


def test_the_schema_declares_what_is_mutated() -> None:
    schema = torch.ops.albatross.sample.default._schema
    mutated = {x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write}
    assert mutated == {"records", "counts", "last_token", "drawn", "is_bad"}
    assert schema.returns == []


@pytest.mark.parametrize(("name", "make", "words"), WRONG_TABLES, ids=[case[0] for case in WRONG_TABLES])
def test_a_wrong_table_is_refused_by_op_name_expected_and_found(
    name: str, make: Callable[[str], torch.Tensor], words: str
) -> None:
    tables = replace(make_tables([Row()], [0], 40), **{name: make("cpu")})
    with pytest.raises(RuntimeError, match="sample: " + words):
        ops.sample(torch.zeros(1, 40), int32([0]), tables, *outputs(1))


def test_wrong_logits_slots_and_outputs_are_refused() -> None:
    tables = make_tables([Row()], [0], 40)
    with pytest.raises(RuntimeError, match=r"sample: logits must be float32 \[K, V\], contiguous within a row, found float16"):
        ops.sample(torch.zeros(1, 40).half(), int32([0]), tables, *outputs(1))
    with pytest.raises(RuntimeError, match=r"sample: slots must be contiguous int32 \[K\] = \[1\] .* found int64"):
        ops.sample(torch.zeros(1, 40), torch.tensor([0]), tables, *outputs(1))
    with pytest.raises(RuntimeError, match=r"sample: drawn must be contiguous int64 \[K\] = \[1\] .* found int64 \[2\]"):
        ops.sample(torch.zeros(1, 40), int32([0]), tables, *outputs(2))
