"""The CUDA kernel of the sampling op: against the float64 oracle, in graphs, on streams, and bit for bit where that must hold."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import pytest
import sampling_cases as cases
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
    distribution,
    fit,
    make_logits,
    make_tables,
)

from albatross import ops
from albatross.ops.sampling import SlotTables

CUDA = "cuda"
SIZES = (1, 2, 5, 100, 511, 513, 4096, 20_001, 65_531, 65_536)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card is visible to torch"),
]


def int32(values: Sequence[int]) -> torch.Tensor:
    return cases.int32(values, CUDA)


def outputs(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cases.outputs(num_rows, CUDA)


def copy(tables: SlotTables, device: str = CUDA) -> SlotTables:
    """Tables that share nothing with `tables`."""
    return SlotTables(*(getattr(tables, each.name).to(device, copy=True) for each in fields(tables)))


def fitted(vocab_size: int) -> list[Row]:
    return [fit(row, vocab_size) for row in KINDS.values()]


def same(left: SlotTables, right: SlotTables) -> bool:
    return all(torch.equal(getattr(left, each.name), getattr(right, each.name)) for each in fields(left))


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize(("spread", "step"), [(3.0, 0.0), (3.0, 0.5), (1.0, 0.0), (0.01, 0.0), (8.0, 0.0), (0.0, 0.0)])
def test_every_kind_of_row_draws_what_the_oracle_draws(vocab_size: int, spread: float, step: float) -> None:
    kinds = fitted(vocab_size)
    slots = torch.randperm(len(kinds) + 2, generator=torch.Generator().manual_seed(2))[: len(kinds)].tolist()
    forbidden = [vocab_size - 1] if vocab_size > 2 else []
    edges = Edges()
    for repeat in range(5):
        rows = [replace(row, choice=repeat) for row in kinds]
        logits = make_logits(len(rows), vocab_size, seed=vocab_size + repeat, spread=spread, step=step)
        drawn, is_bad = outputs(len(rows))
        ops.sample(logits.to(CUDA), int32(slots), make_tables(rows, slots, vocab_size, forbidden, CUDA), drawn, is_bad)
        assert_drawn_as_the_oracle_draws(rows, logits, drawn, is_bad, forbidden, edges)
    assert edges.found <= edges.most


@pytest.mark.parametrize("vocab_size", [100, 4096, 65_536])
def test_the_tables_are_left_as_the_reference_leaves_them(vocab_size: int) -> None:
    rows = fitted(vocab_size)
    slots = list(range(len(rows)))
    on_cpu = make_tables(rows, slots, vocab_size)
    on_card = copy(on_cpu)
    for seed in range(4):
        logits = make_logits(len(rows), vocab_size, seed=seed)
        drawn, is_bad = outputs(len(rows))
        ops.sample(logits.to(CUDA), int32(slots), on_card, drawn, is_bad)
        expected = drawn.cpu(), is_bad.cpu()
        ops.sample(logits, int32(slots).cpu(), on_cpu, drawn.cpu(), is_bad.cpu())
        # Where the two differ in a draw, which only the edge between two ids allows, both go on from the card's.
        differ = on_cpu.last_token[slots] != expected[0]
        assert differ.sum() <= 1
        if differ.any():
            on_cpu = copy(on_card, "cpu")
    assert torch.equal(on_card.records.cpu(), on_cpu.records)
    assert on_card.counts is not None
    assert on_cpu.counts is not None
    torch.testing.assert_close(on_card.counts.cpu(), on_cpu.counts, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_follow_the_oracles_distribution(name: str) -> None:
    assert_frequencies_follow_the_oracle(KINDS[name], 20_000, 300, CUDA)


@pytest.mark.parametrize("row", [Row(top_k=50), Row(top_p=0.4), Row(min_p=0.3), Row(top_k=3, top_p=0.99)])
def test_ids_tied_with_the_last_that_stays_stay(row: Row) -> None:
    vocab_size, number = 5000, 400
    logits = torch.full((vocab_size,), -9.0)
    logits[1000:1100] = 2.0
    logits[4321] = 2.5
    probs = distribution(row, logits)
    assert probs is not None
    rows = [replace(row, choice=i) for i in range(number)]
    slots = list(range(number))
    drawn, is_bad = outputs(number)
    ops.sample(logits.to(CUDA).expand(number, -1), int32(slots), make_tables(rows, slots, vocab_size, device=CUDA), drawn, is_bad)
    assert set(drawn.tolist()) <= set(probs.nonzero().squeeze(1).tolist())
    assert len(set(drawn.tolist())) > 80  # of 100 ties that all stay


@pytest.mark.parametrize("vocab_size", [100, 65_536])
def test_a_row_draws_the_same_bits_alone_and_in_any_batch(vocab_size: int) -> None:
    rows = fitted(vocab_size) * 3
    slots = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    logits = make_logits(len(rows), vocab_size).to(CUDA)
    together = make_tables(rows, slots, vocab_size, device=CUDA)
    alone = copy(together)
    drawn, is_bad = outputs(len(rows))
    ops.sample(logits, int32(slots), together, drawn, is_bad)
    for i, slot in enumerate(slots):
        one, one_is_bad = outputs(1)
        ops.sample(logits[i : i + 1], int32([slot]), alone, one, one_is_bad)
        assert (one, one_is_bad) == (drawn[i], is_bad[i])
    assert same(together, alone)


@pytest.mark.parametrize("spread", [3.0, 0.5])
def test_repeated_runs_are_bitwise_equal(spread: float) -> None:
    """Many blocks at once and atomics in each: a race shows as a difference between runs."""
    rows = [replace(row, seed=i) for i in range(12) for row in KINDS.values()]
    slots = list(range(len(rows)))
    logits = make_logits(len(rows), 65_536, spread=spread).to(CUDA)
    start = make_tables(rows, slots, 65_536, device=CUDA)
    runs = []
    for _ in range(10):
        tables, (drawn, is_bad) = copy(start), outputs(len(rows))
        ops.sample(logits, int32(slots), tables, drawn, is_bad)
        runs.append((tables, drawn))
    assert all(same(tables, runs[0][0]) and torch.equal(drawn, runs[0][1]) for tables, drawn in runs)


def test_a_view_at_an_odd_place_draws_the_same_as_its_copy() -> None:
    rows = fitted(4096)
    slots = list(range(len(rows)))
    logits = make_logits(len(rows), 4103).to(CUDA)[:, 5:4101]
    results = []
    for each in (logits, logits.contiguous()):
        drawn, is_bad = outputs(len(rows))
        ops.sample(each, int32(slots), make_tables(rows, slots, 4096, device=CUDA), drawn, is_bad)
        results.append(drawn)
    assert torch.equal(*results)


def test_nothing_but_what_is_named_is_written() -> None:
    rows = [Row(presence=1.0, decay=0.5, counts={3: 1.0}), Row(top_p=0.5)]
    tables = make_tables(rows, [2, 0], 513, device=CUDA)
    before = copy(tables)
    guarded = torch.full((9,), SENTINEL, device=CUDA), torch.ones(9, dtype=torch.bool, device=CUDA)
    logits = make_logits(5, 513).to(CUDA)
    logits[[1, 2, 4]] = torch.nan  # padding rows may hold anything
    raw = logits.clone()
    ops.sample(logits, int32([2, -1, -5, 0, -1]), tables, guarded[0][2:7], guarded[1][2:7])
    assert torch.equal(logits.nan_to_num(), raw.nan_to_num())
    written = [2, 5]
    untouched = [i for i in range(9) if i not in written]
    assert (guarded[0][untouched] == SENTINEL).all()
    assert guarded[1][untouched].all()
    assert not guarded[1][written].any()
    assert tables.counts is not None
    assert before.counts is not None
    for name in ("records", "last_token", "counts"):
        assert torch.equal(getattr(tables, name)[[1, 3]], getattr(before, name)[[1, 3]])
    assert torch.equal(tables.counts[0], before.counts[0])
    for name in ("edit_ids", "edit_values", "forbidden"):
        assert torch.equal(getattr(tables, name), getattr(before, name))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 700, 4998])
def test_a_row_that_is_not_finite_is_bad_and_its_neighbours_never_notice(value: float, place: int) -> None:
    rows = fitted(4999)
    slots = list(range(len(rows)))
    logits = make_logits(len(rows), 4999).to(CUDA)
    expected = outputs(len(rows))
    ops.sample(logits, int32(slots), make_tables(rows, slots, 4999, device=CUDA), *expected)
    bad = torch.arange(len(rows), device=CUDA) % 2 == 1
    logits[bad, place] = value
    tables, (drawn, is_bad) = make_tables(rows, slots, 4999, device=CUDA), outputs(len(rows))
    before = copy(tables)
    ops.sample(logits, int32(slots), tables, drawn, is_bad)
    assert torch.equal(is_bad, bad)
    assert torch.equal(drawn, expected[0].masked_fill(bad, 0))
    assert torch.equal(tables.last_token[: len(rows)], drawn)
    assert tables.counts is not None
    assert before.counts is not None
    assert torch.equal(tables.counts[: len(rows)][bad], before.counts[: len(rows)][bad])


def test_masks_of_rows_hold_and_a_row_with_no_id_left_is_bad() -> None:
    vocab_size = 999
    ids = [[1, 33, 64, 998], [2, 31, 32], [5], [3]]
    rows = [replace(kind, seed=i) for i in range(100) for kind in (Row(), Row(top_p=0.9), Row(is_greedy=True), Row())]
    slots = list(range(len(rows)))
    allowed = torch.stack([bit_mask(ids[i % 4], vocab_size) for i in slots]).to(CUDA)
    tables = make_tables(rows, slots, vocab_size, forbidden=[3, 998], device=CUDA)
    drawn, is_bad = outputs(len(rows))
    ops.sample(make_logits(len(rows), vocab_size, spread=0.2).to(CUDA), int32(slots), tables, drawn, is_bad, allowed=allowed)
    assert [set(drawn[i::4].tolist()) for i in range(4)] == [{1, 33, 64}, {2, 31, 32}, {5}, {0}]
    assert is_bad[3::4].all()
    assert not is_bad.view(-1, 4)[:, :3].any()


def test_a_full_list_of_edits_holds() -> None:
    vocab_size = 65_536
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))[:1025].tolist()
    row = Row(bias={token_id: 30.0 + i / 100 for i, token_id in enumerate(ids)}, is_greedy=True)
    banned = replace(row, bias=row.bias | {ids[-1]: -torch.inf})
    stopped = replace(row, stops=tuple(ids[-3:]), min_tokens=1)
    tables = make_tables([row, banned, stopped], [0, 1, 2], vocab_size, device=CUDA)
    drawn, is_bad = outputs(3)
    ops.sample(torch.zeros(3, vocab_size, device=CUDA), int32([0, 1, 2]), tables, drawn, is_bad)
    assert drawn.tolist() == [ids[-1], ids[-2], ids[-4]]


def test_a_captured_draw_goes_on_with_every_replay() -> None:
    vocab_size, num_steps = 4096, 6
    rows = fitted(vocab_size)
    slots = list(range(len(rows)))
    steps = [make_logits(len(rows), vocab_size, seed=seed).to(CUDA) for seed in range(num_steps)]
    launched = make_tables(rows, slots, vocab_size, device=CUDA)
    replayed = copy(launched)
    logits, place = torch.empty_like(steps[0]), int32([-1] * len(rows))
    drawn, is_bad = outputs(len(rows))
    ops.sample(logits, place, replayed, drawn, is_bad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.sample(logits, place, replayed, drawn, is_bad)
    place.copy_(int32(slots))
    for step in steps:
        logits.copy_(step)
        graph.replay()
        expected, expected_bad = outputs(len(rows))
        ops.sample(step, int32(slots), launched, expected, expected_bad)
        assert torch.equal(drawn, expected)
    assert same(launched, replayed)


def test_a_side_stream_is_respected() -> None:
    rows = fitted(65_536) * 10
    slots = list(range(len(rows)))
    logits = make_logits(len(rows), 65_536).to(CUDA)
    expected = outputs(len(rows))
    ops.sample(logits, int32(slots), make_tables(rows, slots, 65_536, device=CUDA), *expected)
    tables, (drawn, is_bad) = make_tables(rows, slots, 65_536, device=CUDA), outputs(len(rows))
    late = torch.zeros_like(logits)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(logits)
        ops.sample(late, int32(slots), tables, drawn, is_bad)
    stream.synchronize()
    assert torch.equal(drawn, expected[0])


def test_opcheck_accepts_the_op() -> None:
    tables = make_tables([Row(), fit(KINDS["penalties"], 40)], [2, 0], 40, device=CUDA)
    fixed = (tables.edit_ids, tables.edit_values, tables.forbidden, None, tables.counts, tables.last_token)
    args = (make_logits(3, 40).to(CUDA), int32([2, -1, 0]), tables.records, *fixed, *outputs(3))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.albatross.sample.default, args, test_utils=checks)


@pytest.mark.parametrize(("name", "make", "words"), WRONG_TABLES, ids=[case[0] for case in WRONG_TABLES])
def test_a_wrong_table_is_refused_in_the_words_of_the_cpu(name: str, make: Callable[[str], torch.Tensor], words: str) -> None:
    tables = replace(make_tables([Row()], [0], 40, device=CUDA), **{name: make(CUDA)})
    with pytest.raises(RuntimeError, match="sample: " + words):
        ops.sample(torch.zeros(1, 40, device=CUDA), int32([0]), tables, *outputs(1))


def test_a_vocabulary_beyond_the_kernel_is_refused() -> None:
    vocab_size = 2**19 + 32
    tables = SlotTables.allocate(1, vocab_size, torch.device(CUDA))
    with pytest.raises(RuntimeError, match="sample: logits must be of at most 524288 ids a row"):
        ops.sample(torch.zeros(1, vocab_size, device=CUDA), int32([0]), tables, *outputs(1))
