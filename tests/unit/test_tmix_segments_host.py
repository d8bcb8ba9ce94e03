"""Long rows that the chunked CUDA kernels of time mixing split into segments, on an emulated card (cuda_host/): no less exact,
the same bits in any order, and no trace where nothing is to be read. tests/gpu/test_tmix_segments.py has the same on a card.
"""

import random

import pytest
import torch
from chunk_cases import DECAYS, FLOOR, MARGIN, assert_no_worse, error, make_chunks, poisoned, scan
from cuda_host_cases import HostKernels
from tmix_cases import Tensors, oracle_prefill
from wkv7_cases import SENTINEL, make_pool

LIMIT = 2 * MARGIN * FLOOR  # of the error where no scan says how large it may be
SEGMENT = 8 * 16  # tokens of the shortest


@pytest.fixture
def kernels(host_kernels: HostKernels) -> HostKernels:
    """In an order that changes over often."""
    host_kernels.set_options("random", 1)
    return host_kernels


def make_room(num_segments: int, num_heads: int) -> torch.Tensor:
    return torch.full((num_segments, num_heads, 2, 64, 64), torch.nan)


def num_used(room: torch.Tensor) -> int:
    return int((~room.isnan()).flatten(1).any(1).sum())


def prefill(
    kernels: HostKernels,
    pool: torch.Tensor,
    tensors: Tensors,
    lengths: list[int],
    slots: list[int],
    room: torch.Tensor | None,
    num_producers: int = 8,
    num_blocks: int = 8,
) -> torch.Tensor:
    out = poisoned(tensors)
    kernels.tmix_prefill(pool, tensors, lengths, slots, out, num_producers, num_blocks, room)
    return out


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("num_segments", [3, 4, 5, 8])
def test_a_split_sequence_is_as_exact_as_by_the_scan(kernels: HostKernels, num_segments: int, decay: str) -> None:
    length = num_segments * SEGMENT - 3
    tensors, room = make_chunks(length, 1, decay), make_room(num_segments, 1)
    split, scanned = (make_pool(2, 1, torch.float32) for _ in range(2))
    expected_pool, expected_out = oracle_prefill(split, tensors, [length], [1])

    out = prefill(kernels, split, tensors, [length], [1], room)
    scan_out = scan(scanned, tensors, [length], [1])

    assert num_used(room) == num_segments
    assert_no_worse(error(split[1], expected_pool[1]), error(scanned[1], expected_pool[1]))
    assert_no_worse(error(out, expected_out), error(scan_out, expected_out))


def test_rows_that_are_split_and_rows_that_are_not_agree_with_the_oracle_whatever_the_order(kernels: HostKernels) -> None:
    """More than 32 rows, most of them padding, as in a step that was captured for many."""
    lengths, slots = [0] * 75, [-1] * 75
    for row, slot, length in ((0, 5, 400), (1, 0, 5), (30, 7, 40), (41, 2, 390), (63, 3, 1), (70, 6, 257)):
        lengths[row], slots[row] = length, slot
    lengths[5] = 290  # of a row that is padding
    pool, tensors = make_pool(9, 2, torch.float16), make_chunks(sum(lengths), 2)
    expected_pool, expected_out = oracle_prefill(pool, tensors, lengths, slots)
    assert kernels.num_segments([length for length, slot in zip(lengths, slots, strict=True) if slot >= 0 and length], 9) == [
        3, 1, 1, 3, 1, 1
    ]  # fmt: skip
    results = []

    for order, num_producers, num_blocks in (("random", 8, 1), ("reversed", 4, 8), ("first warps", 8, 40), ("last warps", 8, 6)):
        kernels.set_options(order)
        state, room = pool.clone(), make_room(9, 2)
        out = prefill(kernels, state, tensors, lengths, slots, room, num_producers, num_blocks)
        assert num_used(room) == 6
        results.append((state, out.nan_to_num(SENTINEL)))

    state, out = results[0]
    assert all(torch.equal(one, state) and torch.equal(other, out) for one, other in results)
    assert error(state, expected_pool) < LIMIT
    assert error(out, expected_out) < LIMIT
    assert torch.equal(out == SENTINEL, expected_out.isnan())
    assert torch.equal(state[[1, 4, 8]], pool[[1, 4, 8]])


@pytest.mark.parametrize(("length", "num_segments"), [(3 * SEGMENT - 16, 8), (3 * SEGMENT, 2)], ids=["short", "little-room"])
def test_a_row_that_is_short_or_has_little_room_is_read_in_one_go(kernels: HostKernels, length: int, num_segments: int) -> None:
    tensors, room = make_chunks(length, 1), make_room(num_segments, 1)
    pool, alone = (make_pool(1, 1, torch.float16) for _ in range(2))
    expected = prefill(kernels, alone, tensors, [length], [0], None)

    out = prefill(kernels, pool, tensors, [length], [0], room)

    assert num_used(room) == 0
    assert torch.equal(out, expected)
    assert torch.equal(pool, alone)


def test_a_split_rows_state_is_rounded_once(kernels: HostKernels) -> None:
    tensors = make_chunks(3 * SEGMENT, 1)
    pools = [make_pool(1, 1, torch.float16).to(dtype) for dtype in (torch.float16, torch.float32)]
    outs = [prefill(kernels, pool, tensors, [3 * SEGMENT], [0], make_room(3, 1)) for pool in pools]
    assert torch.equal(pools[0], pools[1].half())
    assert torch.equal(outs[0], outs[1])


def test_a_room_serves_again_whatever_it_holds(kernels: HostKernels) -> None:
    tensors, room = make_chunks(3 * SEGMENT, 1), make_room(3, 1)
    pools = [make_pool(1, 1, torch.float32) for _ in range(2)]
    first = prefill(kernels, pools[0], tensors, [3 * SEGMENT], [0], room)
    prefill(kernels, make_pool(1, 1, torch.float32, seed=9), tensors, [SEGMENT, 2 * SEGMENT], [0, -1], room)
    assert torch.equal(prefill(kernels, pools[1], tensors, [3 * SEGMENT], [0], room), first)
    assert torch.equal(pools[0], pools[1])


def test_keys_whose_scaled_form_would_pass_fp16_are_exact_too(kernels: HostKernels) -> None:
    tensors, pool = make_chunks(3 * SEGMENT, 1, "strong"), make_pool(1, 1, torch.float32)
    tensors["k"] *= 1000
    expected_pool, expected_out = oracle_prefill(pool, tensors, [3 * SEGMENT], [0])

    out = prefill(kernels, pool, tensors, [3 * SEGMENT], [0], make_room(3, 1))

    assert error(pool, expected_pool) < LIMIT
    assert error(out, expected_out) < LIMIT


@pytest.mark.parametrize("size", [2.0**-6, 2.0**10])
def test_a_first_state_of_any_size_comes_to_the_last_segment(kernels: HostKernels, size: float) -> None:
    tensors, pool = make_chunks(3 * SEGMENT, 1, "weak", is_gated=False), make_pool(1, 1, torch.float32) * size
    tensors["v"].zero_()  # so that the state is what the first one becomes
    expected_pool, _ = oracle_prefill(pool, tensors, [3 * SEGMENT], [0])
    prefill(kernels, pool, tensors, [3 * SEGMENT], [0], make_room(3, 1))
    assert error(pool, expected_pool) < 2 * LIMIT


def test_the_segments_of_all_rows_fit_into_the_room_and_none_is_empty(kernels: HostKernels) -> None:
    draw = random.Random(1)
    for _ in range(2000):
        lengths = [int(2 ** draw.uniform(0, draw.choice((5, 10, 17)))) for _ in range(draw.randint(1, 40))]
        room = draw.randint(2, 40)
        plan = kernels.num_segments(lengths, room)
        assert sum(count for count in plan if count > 1) <= room
        for length, count in zip(lengths, plan, strict=True):
            chunks = -(-length // 16)
            segment = -(-chunks // count)
            assert segment * (count - 1) < chunks <= segment * count
            assert count == 1 or (segment >= 8 and 3 <= count <= 16)


def test_a_single_row_gets_all_the_room_but_no_more_than_it_can_use(kernels: HostKernels) -> None:
    assert [kernels.num_segments([length], 4)[0] for length in (4096, 4095, 4097, 600, 400, 368)] == [4, 4, 4, 4, 3, 1]
    assert kernels.num_segments([10**6], 40) == [16]


def test_the_ways_through_the_segments_have_no_bank_conflicts(kernels: HostKernels) -> None:
    kernels.set_options(counts_banks=True)
    prefill(kernels, make_pool(1, 1, torch.float16), make_chunks(3 * SEGMENT, 1), [3 * SEGMENT], [0], make_room(3, 1))
    assert kernels.conflicts() == {}
