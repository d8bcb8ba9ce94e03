"""The chunked CUDA kernel of time mixing over sequences: no less exact than the scan with an fp32 state, whatever the decays, the
lengths and the cuts, and without a trace of padding. What holds for every op is in `test_ops.py`.
"""

import itertools

import pytest
import torch
from chunk_cases import DECAYS, FLOOR, MARGIN, assert_no_worse, error, make_chunks, poisoned, scan
from tmix_cases import DECODE, PREFILL, Tensors, bounds, make_tmix, oracle_prefill
from wkv7_cases import SENTINEL, make_pool, make_spaced_pool

from albatross import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a CUDA build of torch"),
]

DEVICE = "cuda"
HEADS = 4
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 1000]


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    ops.load_native(DEVICE)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make(num_tokens: int, decay: str = "mixed", num_heads: int = HEADS, **options: bool) -> Tensors:
    return make_chunks(num_tokens, num_heads, decay, DEVICE, **options)


def prefill(pool: torch.Tensor, tensors: Tensors, lengths: list[int], slots: list[int]) -> torch.Tensor:
    out = poisoned(tensors)
    arguments = {**tensors, "state": pool, "cu_seqlens": int32(bounds(lengths)), "slots": int32(slots), "out": out}
    ops.tmix_prefill(*(arguments[name] for name in PREFILL))
    return out


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_sequence_is_as_exact_as_by_the_scan(length: int, decay: str, state_dtype: torch.dtype) -> None:
    tensors = make(length, decay)
    chunked, scanned = (make_pool(2, HEADS, state_dtype, DEVICE) for _ in range(2))
    expected_pool, expected_out = oracle_prefill(chunked, tensors, [length], [1])

    out, scan_out = prefill(chunked, tensors, [length], [1]), scan(scanned, tensors, [length], [1])

    assert_no_worse(error(chunked[1], expected_pool[1]), error(scanned[1], expected_pool[1]))
    assert_no_worse(error(out, expected_out), error(scan_out, expected_out))


@pytest.mark.parametrize("decay", DECAYS)
def test_a_long_sequence_is_as_exact_as_by_the_scan(decay: str) -> None:
    tensors = make(4096, decay, num_heads=1)
    chunked, scanned = (make_pool(1, 1, torch.float32, DEVICE) for _ in range(2))
    expected_pool, expected_out = oracle_prefill(chunked, tensors, [4096], [0])

    out, scan_out = prefill(chunked, tensors, [4096], [0]), scan(scanned, tensors, [4096], [0])

    assert_no_worse(error(chunked, expected_pool), error(scanned, expected_pool))
    assert_no_worse(error(out, expected_out), error(scan_out, expected_out))


@pytest.mark.parametrize("num_heads", [4, 12, 40, 64])
@pytest.mark.parametrize("is_gated", [True, False])
def test_packed_rows_agree_with_the_oracle(is_gated: bool, num_heads: int) -> None:
    lengths, slots = [17, 1, 0, 64, 5, 33], [3, 0, 5, 6, 1, 2]
    tensors = make(sum(lengths), num_heads=num_heads, is_gated=is_gated)
    pool = make_pool(7, num_heads, torch.float16, DEVICE)
    expected_pool, expected_out = oracle_prefill(pool, tensors, lengths, slots)

    out = prefill(pool, tensors, lengths, slots)

    assert error(pool, expected_pool) < MARGIN * FLOOR * 2
    assert error(out, expected_out) < MARGIN * FLOOR * 2


def test_padding_rows_empty_rows_and_tokens_past_the_end_leave_no_trace() -> None:
    pool = torch.full((4, 3, HEADS, 64, 64), SENTINEL, dtype=torch.float16, device=DEVICE)
    before, tensors = pool.clone(), make(43)
    for name in ("r", "k", "v", "w", "a", "v_gate", "g", "v_first"):
        tensors[name][20:] = torch.nan

    out = prefill(pool[:, 1], tensors, [20, 13, 0], [3, -7, 1])

    assert torch.isfinite(out[:20]).all()
    assert out[20:].isnan().all()
    assert torch.isfinite(pool[3, 1]).all()
    pool[3, 1] = SENTINEL
    assert torch.equal(pool, before)


def test_what_lies_between_the_slots_is_left_alone() -> None:
    pool, between = make_spaced_pool(5, HEADS, 12345 * 8, torch.float16, DEVICE)
    prefill(pool, make(40), [7, 33], [4, 0])
    assert (between == SENTINEL).all()


@pytest.mark.parametrize("cut", [1, 7, 15, 16, 17, 64, 99])
def test_a_sequence_cut_anywhere_ends_in_the_same_state(cut: int) -> None:
    tensors = make(100)
    pools = [make_pool(1, HEADS, torch.float32, DEVICE) for _ in range(3)]
    expected_pool, _ = oracle_prefill(pools[0], tensors, [100], [0])
    scan(pools[0], tensors, [100], [0])
    for part in (slice(0, cut), slice(cut, 100)):
        rows = {name: x[part] if x is not None and len(x) == 100 else x for name, x in tensors.items()}
        prefill(pools[1], rows, [part.stop - part.start], [0])

    assert_no_worse(error(pools[1], expected_pool), error(pools[0], expected_pool))


def test_prefill_and_then_decode_is_decode_alone() -> None:
    tensors = make(40)
    pools = [make_pool(1, HEADS, torch.float32, DEVICE) for _ in range(2)]
    expected_pool, expected_out = oracle_prefill(pools[0], tensors, [40], [0])
    rows = [{name: x[t : t + 1] if x is not None and len(x) == 40 else x for name, x in tensors.items()} for t in range(40)]

    def decode(pool: torch.Tensor, row: Tensors) -> torch.Tensor:
        out = poisoned(row)
        ops.tmix_decode(*({**row, "state": pool, "slots": int32([0]), "out": out}[name] for name in DECODE))
        return out

    alone = torch.cat([decode(pools[0], row) for row in rows])
    head = {name: x[:24] if x is not None and len(x) == 40 else x for name, x in tensors.items()}
    both = torch.cat([prefill(pools[1], head, [24], [0]), *(decode(pools[1], row) for row in rows[24:])])

    assert_no_worse(error(pools[1], expected_pool), error(pools[0], expected_pool))
    assert_no_worse(error(both, expected_out), error(alone, expected_out))


def test_a_row_gets_the_same_bits_alone_and_in_any_batch() -> None:
    lengths = [40, 3, 64, 17] * 20
    tensors, ends = make(sum(lengths)), bounds(lengths)
    together, alone = (make_pool(len(lengths), HEADS, torch.float16, DEVICE) for _ in range(2))
    out = prefill(together, tensors, lengths, list(range(len(lengths))))
    for row in (0, 1, 38, 79):
        part = slice(ends[row], ends[row + 1])
        rows = {name: x[part] if x is not None and len(x) == sum(lengths) else x for name, x in tensors.items()}
        assert torch.equal(prefill(alone, rows, [lengths[row]], [row]), out[part])
        assert torch.equal(alone[row], together[row])


def test_twenty_runs_give_the_same_bits() -> None:
    lengths = [37, 1, 0, 200, 8] * 12
    tensors, slots = make(sum(lengths)), list(range(len(lengths)))
    runs = []
    for _ in range(20):
        pool = make_pool(len(lengths), HEADS, torch.float16, DEVICE)
        runs.append((pool, prefill(pool, tensors, lengths, slots)))
    assert all(torch.equal(pool, runs[0][0]) and torch.equal(out, runs[0][1]) for pool, out in runs)


def test_a_captured_graph_follows_new_slots_and_lengths() -> None:
    tensors, pool = make(48), make_pool(8, HEADS, torch.float32, DEVICE)
    slots, cu_seqlens = int32([-1] * 3), int32([0] * 4)
    out = poisoned(tensors)
    arguments = {**tensors, "state": pool, "cu_seqlens": cu_seqlens, "slots": slots, "out": out}
    call = [arguments[name] for name in PREFILL]
    ops.tmix_prefill(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.tmix_prefill(*call)

    for lengths, places in (([16, 17, 5], [3, -1, 0]), ([0, 1, 47], [5, 6, 1])):
        slots.copy_(int32(places))
        cu_seqlens.copy_(int32(bounds(lengths)))
        expected_pool = pool.clone()
        expected_out = prefill(expected_pool, tensors, lengths, places)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(pool, expected_pool)
        assert torch.equal(out.nan_to_num(SENTINEL), expected_out.nan_to_num(SENTINEL))


@pytest.mark.parametrize(("name", "value"), list(itertools.product(("w", "a", "v_gate"), (-60000.0, 60000.0))))
def test_gates_and_decays_at_their_limits_give_the_oracles_numbers(name: str, value: float) -> None:
    tensors, pool = make(40), make_pool(1, HEADS, torch.float32, DEVICE)
    tensors[name].fill_(value)
    expected_pool, expected_out = oracle_prefill(pool, tensors, [40], [0])

    out = prefill(pool, tensors, [40], [0])

    assert error(pool, expected_pool) < MARGIN * FLOOR * 2
    assert error(out, expected_out) < MARGIN * FLOOR * 2


@pytest.mark.parametrize("name", ["k", "v", "r", "g"])
def test_zeros_give_finite_numbers(name: str) -> None:
    tensors, pool = make(33, is_gated=False), make_pool(1, HEADS, torch.float16, DEVICE)
    tensors[name].zero_()
    assert torch.isfinite(prefill(pool, tensors, [33], [0])).all()
    assert torch.isfinite(pool).all()


@pytest.mark.parametrize(("name", "size"), list(itertools.product(("k", "r"), (900.0, 4000.0))))
def test_numbers_whose_scaled_form_would_pass_fp16_are_exact_too(name: str, size: float) -> None:
    tensors = make(40, "strong")
    tensors[name] *= size / 4
    chunked, scanned = (make_pool(1, HEADS, torch.float32, DEVICE) for _ in range(2))
    expected_pool, expected_out = oracle_prefill(chunked, tensors, [40], [0])

    out, scan_out = prefill(chunked, tensors, [40], [0]), scan(scanned, tensors, [40], [0])

    assert_no_worse(error(chunked, expected_pool), error(scanned, expected_pool))
    assert_no_worse(error(out, expected_out), error(scan_out, expected_out))


@pytest.mark.parametrize(("key", "receptance"), [(150, 150), (3000, 20), (4, 12000)])
def test_products_that_would_pass_fp16_though_their_factors_do_not_are_exact_too(key: int, receptance: int) -> None:
    tensors, pool = make(40, "weak"), make_pool(1, HEADS, torch.float32, DEVICE)
    tensors["k"] *= key
    tensors["r"] *= receptance
    tensors["g"] /= key * receptance  # so that the output is one of fp16's numbers
    expected_pool, expected_out = oracle_prefill(pool, tensors, [40], [0])

    out = prefill(pool, tensors, [40], [0])

    assert error(pool, expected_pool) < MARGIN * FLOOR * 2
    assert error(out, expected_out) < MARGIN * FLOOR * 2


@pytest.mark.parametrize("name", ["k", "r"])
def test_numbers_with_which_the_scan_passes_fp16_agree_with_the_oracle(name: str) -> None:
    tensors, pool = make(40, "strong"), make_pool(1, HEADS, torch.float32, DEVICE)
    tensors[name] *= 4000
    tensors["g"] /= 1000  # so that the output is one of fp16's numbers
    expected_pool, expected_out = oracle_prefill(pool, tensors, [40], [0])

    out = prefill(pool, tensors, [40], [0])

    assert error(pool, expected_pool) < MARGIN * FLOOR * 2
    assert error(out, expected_out) < MARGIN * FLOOR * 2


def test_a_nan_stays_in_its_row() -> None:
    tensors, pool = make(50), make_pool(2, HEADS, torch.float16, DEVICE)
    clean = prefill(pool.clone(), tensors, [25, 25], [0, 1])
    tensors["k"][3] = torch.nan
    out = prefill(pool, tensors, [25, 25], [0, 1])
    assert torch.equal(out[25:], clean[25:])
    assert torch.isfinite(pool[1]).all()
    assert out[:25].isnan().any()


def test_fp32_vectors_go_by_the_scan() -> None:
    lengths, slots = [17, 0, 3, 5], [2, 1, -1, 0]
    tensors, pool = make_tmix(25, HEADS, torch.float32, DEVICE), make_pool(3, HEADS, torch.float32, DEVICE)
    expected_pool, expected_out = oracle_prefill(pool, tensors, lengths, slots)
    out = prefill(pool, tensors, lengths, slots)
    assert error(pool, expected_pool) < 1e-5
    assert error(out, expected_out) < 1e-5
    assert torch.equal(out.isnan().cpu(), expected_out.isnan())
