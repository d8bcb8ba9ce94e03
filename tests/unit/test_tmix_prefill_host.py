"""The chunked CUDA kernel of time mixing on an emulated card (cuda_host/): its numbers, whatever the order of its threads, with
each access to memory in bounds and ordered, and its bank conflicts. Of speed and of a card's own rounding nothing here can say;
tests/gpu/test_tmix_prefill.py has the same kernel on a card.
"""

import itertools

import pytest
import torch
from chunk_cases import DECAYS, FLOOR, MARGIN, assert_no_worse, error, make_chunks, poisoned, scan
from cuda_host_cases import ORDERS, ROOMS, HostKernels
from tmix_cases import PRODUCTS, Tensors, oracle_prefill
from wkv7_cases import SENTINEL, make_pool, make_spaced_pool

HEADS = 2
STATE_DTYPES = [torch.float16, torch.float32]
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 65]
LIMIT = 2 * MARGIN * FLOOR  # of the error where no scan says how large it may be


@pytest.fixture
def kernels(host_kernels: HostKernels) -> HostKernels:
    """In an order that changes over often."""
    host_kernels.set_options("random", 1)
    return host_kernels


def prefill(
    kernels: HostKernels, pool: torch.Tensor, tensors: Tensors, lengths: list[int], slots: list[int], *card: int
) -> torch.Tensor:
    """card: numbers of producers and of blocks, see `HostKernels.tmix_prefill`."""
    out = poisoned(tensors)
    kernels.tmix_prefill(pool, tensors, lengths, slots, out, *card)
    return out


def tokens_of(tensors: Tensors, part: slice) -> Tensors:
    return {name: x[part] if name in PRODUCTS and x is not None else x for name, x in tensors.items()}


def assert_as_exact_as_the_scan(kernels: HostKernels, tensors: Tensors, state_dtype: torch.dtype, num_producers: int = 8) -> None:
    length = len(tensors["r"])
    chunked, scanned = (make_pool(2, HEADS, state_dtype) for _ in range(2))
    expected_pool, expected_out = oracle_prefill(chunked, tensors, [length], [1])

    out = prefill(kernels, chunked, tensors, [length], [1], num_producers)
    scan_out = scan(scanned, tensors, [length], [1])

    assert_no_worse(error(chunked[1], expected_pool[1]), error(scanned[1], expected_pool[1]))
    assert_no_worse(error(out, expected_out), error(scan_out, expected_out))


@pytest.mark.parametrize("num_producers", ROOMS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_sequence_is_as_exact_as_by_the_scan(
    kernels: HostKernels, length: int, decay: str, state_dtype: torch.dtype, num_producers: int
) -> None:
    assert_as_exact_as_the_scan(kernels, make_chunks(length, HEADS, decay), state_dtype, num_producers)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_sequence_in_which_stages_come_back_often_is_as_exact_as_by_the_scan(kernels: HostKernels, decay: str) -> None:
    assert_as_exact_as_the_scan(kernels, make_chunks(200, HEADS, decay), torch.float16, num_producers=4)


@pytest.mark.parametrize("is_gated", [True, False])
def test_packed_rows_agree_with_the_oracle_whatever_the_order(kernels: HostKernels, is_gated: bool) -> None:
    lengths, slots = [17, 1, 0, 64, 5, 33, 9, 20], [3, 0, 5, 6, 1, 2, -1, -7]
    tensors = make_chunks(sum(lengths) + 3, HEADS, is_gated=is_gated)  # three tokens past the end
    for name in PRODUCTS:
        if tensors[name] is not None:
            tensors[name][120:] = torch.nan
    pool = make_pool(7, HEADS, torch.float16)
    expected_pool, expected_out = oracle_prefill(pool, tensors, lengths, slots)
    expected_out[149:] = torch.nan
    results = []

    for order, num_producers in itertools.product(ORDERS, ROOMS):
        for seed in range(2 if order == "random" else 1):
            kernels.set_options(order, seed)
            state = pool.clone()
            results.append((state, prefill(kernels, state, tensors, lengths, slots, num_producers).nan_to_num(SENTINEL)))

    state, out = results[0]
    assert all(torch.equal(one, state) and torch.equal(other, out) for one, other in results)
    assert error(state, expected_pool) < LIMIT
    assert error(out[:120], expected_out[:120]) < LIMIT
    assert (out[120:] == SENTINEL).all()
    assert torch.equal(state[[4, 5]], pool[[4, 5]])


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 5, 6, 40, 1000])
def test_any_number_of_blocks_shares_the_rows(kernels: HostKernels, num_blocks: int) -> None:
    """More than 32 rows, most of them padding, as in a step that was captured for many."""
    lengths, slots = [0] * 75, [-1] * 75
    for slot, (row, length) in enumerate({0: 3, 1: 40, 30: 1, 31: 17, 32: 16, 33: 150, 63: 2, 64: 33, 74: 20}.items()):
        lengths[row], slots[row] = length, slot
    lengths[5] = 30  # of a row that is padding
    pool, tensors = make_pool(10, HEADS, torch.float16), make_chunks(sum(lengths), HEADS)
    expected_pool, expected_out = oracle_prefill(pool, tensors, lengths, slots)
    alone, together = pool.clone(), pool.clone()
    expected = prefill(kernels, alone, tensors, lengths, slots)

    out = prefill(kernels, together, tensors, lengths, slots, 4, num_blocks)

    assert torch.equal(out.nan_to_num(SENTINEL), expected.nan_to_num(SENTINEL))
    assert torch.equal(together, alone)
    assert error(together, expected_pool) < LIMIT
    assert error(out, expected_out) < LIMIT
    assert torch.equal(out.isnan(), expected_out.isnan())


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_what_lies_between_the_slots_is_left_alone(kernels: HostKernels, state_dtype: torch.dtype) -> None:
    pool, between = make_spaced_pool(5, HEADS, 1234 * 8, state_dtype, "cpu")
    prefill(kernels, pool, make_chunks(40, HEADS), [7, 33], [4, 0])
    assert (between == SENTINEL).all()


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 64])
def test_a_sequence_cut_anywhere_ends_in_the_same_state(kernels: HostKernels, cut: int) -> None:
    tensors = make_chunks(80, HEADS)
    chunked, scanned = (make_pool(1, HEADS, torch.float32) for _ in range(2))
    expected_pool, _ = oracle_prefill(chunked, tensors, [80], [0])
    scan(scanned, tensors, [80], [0])
    for part in (slice(0, cut), slice(cut, 80)):
        prefill(kernels, chunked, tokens_of(tensors, part), [part.stop - part.start], [0])

    assert_no_worse(error(chunked, expected_pool), error(scanned, expected_pool))


@pytest.mark.parametrize("size", [900.0, 4000.0])
@pytest.mark.parametrize("name", ["k", "r"])
def test_numbers_whose_scaled_form_would_pass_fp16_are_exact_too(kernels: HostKernels, name: str, size: float) -> None:
    tensors = make_chunks(40, HEADS, "strong")
    tensors[name] *= size / 4
    assert_as_exact_as_the_scan(kernels, tensors, torch.float32)


@pytest.mark.parametrize(("key", "receptance"), [(150, 150), (3000, 20), (4, 12000)])
def test_products_that_would_pass_fp16_though_their_factors_do_not_are_exact_too(
    kernels: HostKernels, key: int, receptance: int
) -> None:
    tensors, pool = make_chunks(40, HEADS, "weak"), make_pool(1, HEADS, torch.float32)
    tensors["k"] *= key
    tensors["r"] *= receptance
    tensors["g"] /= key * receptance  # so that the output is one of fp16's numbers
    expected_pool, expected_out = oracle_prefill(pool, tensors, [40], [0])

    out = prefill(kernels, pool, tensors, [40], [0])

    assert error(pool, expected_pool) < LIMIT
    assert error(out, expected_out) < LIMIT


@pytest.mark.parametrize("name", ["k", "r"])
def test_numbers_with_which_the_scan_passes_fp16_agree_with_the_oracle(kernels: HostKernels, name: str) -> None:
    tensors, pool = make_chunks(40, HEADS, "strong"), make_pool(1, HEADS, torch.float32)
    tensors[name] *= 4000
    tensors["g"] /= 1000  # so that the output is one of fp16's numbers
    expected_pool, expected_out = oracle_prefill(pool, tensors, [40], [0])

    out = prefill(kernels, pool, tensors, [40], [0])

    assert error(pool, expected_pool) < LIMIT
    assert error(out, expected_out) < LIMIT


@pytest.mark.parametrize("value", [-60000.0, 60000.0])
@pytest.mark.parametrize("name", ["w", "a", "v_gate"])
def test_gates_and_decays_at_their_limits_give_the_oracles_numbers(kernels: HostKernels, name: str, value: float) -> None:
    tensors, pool = make_chunks(40, HEADS), make_pool(1, HEADS, torch.float32)
    tensors[name].fill_(value)
    expected_pool, expected_out = oracle_prefill(pool, tensors, [40], [0])

    out = prefill(kernels, pool, tensors, [40], [0])

    assert error(pool, expected_pool) < LIMIT
    assert error(out, expected_out) < LIMIT


@pytest.mark.parametrize("name", ["k", "v", "r", "g"])
def test_zeros_give_finite_numbers(kernels: HostKernels, name: str) -> None:
    tensors, pool = make_chunks(33, HEADS, is_gated=False), make_pool(1, HEADS, torch.float16)
    tensors[name].zero_()
    assert torch.isfinite(prefill(kernels, pool, tensors, [33], [0])).all()
    assert torch.isfinite(pool).all()


def test_a_nan_stays_in_its_row(kernels: HostKernels) -> None:
    tensors, pool = make_chunks(50, HEADS), make_pool(2, HEADS, torch.float16)
    clean = prefill(kernels, pool.clone(), tensors, [25, 25], [0, 1])
    tensors["k"][3] = torch.nan
    out = prefill(kernels, pool, tensors, [25, 25], [0, 1])
    assert torch.equal(out[25:], clean[25:])
    assert torch.isfinite(pool[1]).all()
    assert out[:25].isnan().any()


@pytest.mark.parametrize(("length", "slot"), [(34, 0), (33, 2)], ids=["past-the-last-token", "no-such-slot"])
def test_a_row_that_is_not_there_stops_the_kernel(kernels: HostKernels, length: int, slot: int) -> None:
    with pytest.raises(RuntimeError, match="the kernel stopped itself"):
        prefill(kernels, make_pool(2, HEADS, torch.float16), make_chunks(33, HEADS), [length], [slot])


@pytest.mark.parametrize("k_size", [1.0, 4000.0], ids=["usual", "large"])
def test_the_ways_through_the_chunks_have_no_bank_conflicts(kernels: HostKernels, k_size: float) -> None:
    tensors = make_chunks(64, HEADS, "strong")
    tensors["k"] *= k_size
    kernels.set_options(counts_banks=True)
    prefill(kernels, make_pool(1, HEADS, torch.float16), tensors, [64], [0])
    assert kernels.conflicts() == {}
