"""Long sequences that the chunked CUDA kernels of time mixing split into segments: as exact as the scan, the same bits in every
run, and lengths that change under a captured graph. What holds whether they are split or not is in `test_tmix_prefill.py`.
"""

import pytest
import torch
from chunk_cases import DECAYS, FLOOR, MARGIN, assert_no_worse, error, make_chunks, poisoned, scan
from tmix_cases import PREFILL, Tensors, bounds, oracle_prefill
from wkv7_cases import SENTINEL, make_pool

from albatross import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a CUDA build of torch"),
]

DEVICE = "cuda"
SEGMENT = 8 * 16  # tokens of the shortest
MIXED = [400, 5, 0, 40, 1000, 265, 1]  # some of them are long


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    ops.load_native(DEVICE)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make(num_tokens: int, num_heads: int = 1, decay: str = "mixed") -> Tensors:
    return make_chunks(num_tokens, num_heads, decay, DEVICE)


def make_room(num_segments: int, num_heads: int = 1) -> torch.Tensor:
    return torch.full((num_segments, num_heads, 2, 64, 64), torch.nan, device=DEVICE)


def num_used(room: torch.Tensor) -> int:
    return int((~room.isnan()).flatten(1).any(1).sum())


def prefill(
    pool: torch.Tensor, tensors: Tensors, lengths: list[int], slots: list[int], room: torch.Tensor | None
) -> torch.Tensor:
    out = poisoned(tensors)
    arguments = {**tensors, "state": pool, "cu_seqlens": int32(bounds(lengths)), "slots": int32(slots), "out": out}
    ops.tmix_prefill(*(arguments[name] for name in PREFILL), room)
    return out


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("num_segments", "length"), [(3, 381), (4, 4096), (5, 700), (8, 1021), (11, 2000)])
def test_a_split_sequence_is_as_exact_as_by_the_scan(
    num_segments: int, length: int, decay: str, state_dtype: torch.dtype
) -> None:
    tensors, room = make(length, decay=decay), make_room(num_segments)
    split, scanned = (make_pool(2, 1, state_dtype, DEVICE) for _ in range(2))
    expected_pool, expected_out = oracle_prefill(split, tensors, [length], [1])

    out, scan_out = prefill(split, tensors, [length], [1], room), scan(scanned, tensors, [length], [1])

    assert num_used(room) == num_segments
    assert_no_worse(error(split[1], expected_pool[1]), error(scanned[1], expected_pool[1]))
    assert_no_worse(error(out, expected_out), error(scan_out, expected_out))


@pytest.mark.parametrize("num_heads", [4, 12, 32])
@pytest.mark.parametrize("num_padding", [0, 1000])
def test_rows_that_are_split_and_rows_that_are_not_agree_with_the_oracle(num_heads: int, num_padding: int) -> None:
    lengths, slots = MIXED + [0] * num_padding, [5, 0, 6, 7, 2, -1, 1] + [-1] * num_padding
    tensors, pool = make(sum(lengths), num_heads), make_pool(9, num_heads, torch.float16, DEVICE)
    before, room = pool.clone(), make_room(12, num_heads)
    expected_pool, expected_out = oracle_prefill(pool, tensors, lengths, slots)

    out = prefill(pool, tensors, lengths, slots, room)

    assert num_used(room) == 10  # three for 400 tokens, seven for 1,000
    assert error(pool, expected_pool) < MARGIN * FLOOR * 2
    assert error(out, expected_out) < MARGIN * FLOOR * 2
    assert torch.equal(out.isnan().cpu(), expected_out.isnan())
    assert torch.equal(pool[[3, 4, 6, 8]], before[[3, 4, 6, 8]])


@pytest.mark.parametrize(("length", "num_segments"), [(3 * SEGMENT - 16, 8), (3 * SEGMENT, 2)], ids=["short", "little-room"])
def test_a_row_that_is_short_or_has_little_room_is_read_in_one_go(length: int, num_segments: int) -> None:
    tensors, room = make(length), make_room(num_segments)
    pool, alone = (make_pool(1, 1, torch.float16, DEVICE) for _ in range(2))
    expected = prefill(alone, tensors, [length], [0], None)
    assert torch.equal(prefill(pool, tensors, [length], [0], room), expected)
    assert torch.equal(pool, alone)
    assert num_used(room) == 0


def test_a_split_rows_state_is_rounded_once() -> None:
    tensors = make(1000)
    pools = [make_pool(1, 1, torch.float16, DEVICE).to(dtype) for dtype in (torch.float16, torch.float32)]
    outs = [prefill(pool, tensors, [1000], [0], make_room(4)) for pool in pools]
    assert torch.equal(pools[0], pools[1].half())
    assert torch.equal(outs[0], outs[1])


def test_fifty_runs_in_a_row_give_the_same_bits() -> None:
    """With one room and no pause between them, as the layers of a model."""
    tensors, slots, room = make(sum(MIXED), 32), list(range(len(MIXED))), make_room(12, 32)
    pools = [make_pool(len(MIXED), 32, torch.float16, DEVICE) for _ in range(50)]
    outs = [prefill(pool, tensors, MIXED, slots, room) for pool in pools]
    assert all(torch.equal(pool, pools[0]) for pool in pools)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_captured_graph_follows_new_slots_and_lengths() -> None:
    tensors, pool, room = make(700, 4), make_pool(8, 4, torch.float32, DEVICE), make_room(4, 4)
    slots, cu_seqlens, out = int32([-1] * 3), int32([0] * 4), poisoned(tensors)
    arguments = {**tensors, "state": pool, "cu_seqlens": cu_seqlens, "slots": slots, "out": out}
    call = [*(arguments[name] for name in PREFILL), room]
    ops.tmix_prefill(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.tmix_prefill(*call)

    for lengths, places in (([600, 17, 5], [3, -1, 0]), ([0, 1, 47], [5, 6, 1]), ([330, 2, 360], [1, 7, 2])):
        slots.copy_(int32(places))
        cu_seqlens.copy_(int32(bounds(lengths)))
        expected_pool = pool.clone()
        expected_out = prefill(expected_pool, tensors, lengths, places, make_room(4, 4))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(pool, expected_pool)
        assert torch.equal(out.nan_to_num(SENTINEL), expected_out.nan_to_num(SENTINEL))


def test_the_room_lets_one_sequence_fill_the_card_or_there_is_none() -> None:
    device = torch.device(DEVICE)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    room = ops.segment_room(4, 4096, device)
    assert room is not None
    assert room.shape == (processors // 4, 4, 2, 64, 64)
    assert ops.segment_room(processors // 2, 4096, device) is None
    assert ops.segment_room(4, 256, device) is None
