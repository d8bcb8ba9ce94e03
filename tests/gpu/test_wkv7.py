"""The CUDA kernel of the recurrence over sequences: against the float64 oracle, in graphs, on streams, and bit for bit where bits
must agree.
"""

import itertools

import pytest
import torch
from wkv7_cases import SENTINEL, make_pool, make_spaced_pool, make_vectors, oracle_rows, relative_error, tolerance

from albatross import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a CUDA build of torch"),
]

DEVICE = "cuda"
DTYPES = [torch.float16, torch.float32]
LENGTHS = [[1], [7], [8], [9], [64, 0, 5, 129, 1], [1] * 33]


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    ops.load_native(DEVICE)


def int32(values: list[int], device: str = DEVICE) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def bounds(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def shuffled_slots(num_rows: int) -> list[int]:
    return torch.randperm(num_rows + 2, generator=torch.Generator().manual_seed(2))[:num_rows].tolist()


def poisoned(num_tokens: int, num_heads: int, dtype: torch.dtype, device: str = DEVICE) -> torch.Tensor:
    return torch.full((num_tokens, num_heads, 64), float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [4, 12, 40, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_prefill_agrees_with_the_oracle(
    lengths: list[int], num_heads: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    pool = make_pool(len(lengths) + 2, num_heads, state_dtype, DEVICE)
    vectors = make_vectors(sum(lengths), num_heads, dtype, DEVICE)
    slots, y = shuffled_slots(len(lengths)), poisoned(sum(lengths), num_heads, dtype)
    expected_pool, expected_y = oracle_rows(pool, vectors, bounds(lengths), slots, y)

    ops.wkv7_prefill(pool, *vectors, int32(bounds(lengths)), int32(slots), y)

    assert relative_error(pool, expected_pool) < tolerance(state_dtype, max(lengths))
    assert relative_error(y, expected_y) < tolerance(dtype, max(lengths))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_leaves_padding_rows_empty_rows_and_tokens_past_the_end_untouched(dtype: torch.dtype) -> None:
    pool = torch.full((4, 3, 5, 64, 64), SENTINEL, dtype=torch.float16, device=DEVICE)
    before = pool.clone()
    vectors = make_vectors(23, 5, dtype, DEVICE)
    for x in vectors:
        x[11:] = float("nan")
    y = torch.full((23, 5, 64), SENTINEL, dtype=dtype, device=DEVICE)

    ops.wkv7_prefill(pool[:, 1], *vectors, int32([0, 11, 20, 20]), int32([3, -7, 1]), y)

    pool[3, 1] = SENTINEL
    assert torch.equal(pool, before)
    assert (y[11:] == SENTINEL).all()
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("gap", [8, 4096, 12345 * 8])
def test_any_distance_between_slots_works(gap: int) -> None:
    pool, between = make_spaced_pool(5, 4, gap, torch.float16, DEVICE)
    vectors, y = make_vectors(3, 4, torch.float16, DEVICE), poisoned(3, 4, torch.float16)
    expected_pool, expected_y = oracle_rows(pool, vectors, [0, 1, 2, 3], [4, 0, 2], y)

    ops.wkv7_prefill(pool, *vectors, int32([0, 1, 2, 3]), int32([4, 0, 2]), y)

    assert relative_error(pool, expected_pool) < tolerance(torch.float16)
    assert relative_error(y, expected_y) < tolerance(torch.float16)
    assert (between == SENTINEL).all()


def test_a_row_gets_the_same_bits_alone_and_in_any_batch() -> None:
    vectors = make_vectors(257, 12, torch.float16, DEVICE)
    together, alone = (make_pool(257, 12, torch.float16, DEVICE) for _ in range(2))
    y_together, y_alone = poisoned(257, 12, torch.float16), poisoned(257, 12, torch.float16)

    ops.wkv7_prefill(together, *vectors, int32(list(range(258))), int32(list(range(257))), y_together)
    for row in (0, 100, 256):
        single = [x[row : row + 1] for x in vectors]
        ops.wkv7_prefill(alone, *single, int32([0, 1]), int32([row]), y_alone[row : row + 1])
        assert torch.equal(alone[row], together[row])
        assert torch.equal(y_alone[row], y_together[row])


@pytest.mark.parametrize("cut", [1, 7, 8, 16, 39])
def test_a_prefill_cut_anywhere_gets_the_same_bits_with_a_float32_state(cut: int) -> None:
    vectors = make_vectors(40, 4, torch.float16, DEVICE)
    whole, parts = (make_pool(1, 4, torch.float32, DEVICE) for _ in range(2))
    y_whole, y_parts = poisoned(40, 4, torch.float16), poisoned(40, 4, torch.float16)

    ops.wkv7_prefill(whole, *vectors, int32([0, 40]), int32([0]), y_whole)
    for part in (slice(0, cut), slice(cut, 40)):
        cu_seqlens = int32([0, part.stop - part.start])
        ops.wkv7_prefill(parts, *(x[part] for x in vectors), cu_seqlens, int32([0]), y_parts[part])

    assert torch.equal(parts, whole)
    assert torch.equal(y_parts, y_whole)


def test_twenty_runs_give_the_same_bits() -> None:
    lengths = [37, 1, 0, 200, 8] * 12
    vectors = make_vectors(sum(lengths), 12, torch.float16, DEVICE)
    cu_seqlens, slots = int32(bounds(lengths)), int32(list(range(len(lengths))))
    first = None
    for _ in range(20):
        pool, y = make_pool(len(lengths), 12, torch.float16, DEVICE), poisoned(sum(lengths), 12, torch.float16)
        ops.wkv7_prefill(pool, *vectors, cu_seqlens, slots, y)
        first = first or (pool, y)
        assert torch.equal(pool, first[0])
        assert torch.equal(y, first[1])


def test_a_captured_graph_follows_new_inputs_slots_and_lengths() -> None:
    num_rows, num_heads = 6, 12
    vectors = make_vectors(num_rows, num_heads, torch.float16, DEVICE)
    pool, y = make_pool(8, num_heads, torch.float32, DEVICE), poisoned(num_rows, num_heads, torch.float16)
    slots, cu_seqlens = int32([-1] * num_rows), int32([0] * (num_rows + 1))

    def run(pool: torch.Tensor, y: torch.Tensor) -> None:
        ops.wkv7_prefill(pool, *vectors, cu_seqlens, slots, y)

    run(pool, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(pool, y)

    steps = [([3, -1, 0, 7, -1, 2], [0, 1, 1, 4, 4, 5, 6]), ([5, 6, -2, 1, 4, 0], [0, 0, 2, 2, 3, 6, 6])]
    for seed, (new_slots, new_bounds) in enumerate(steps):
        for x, source in zip(vectors, make_vectors(num_rows, num_heads, torch.float16, DEVICE, seed), strict=True):
            x.copy_(source)
        slots.copy_(int32(new_slots))
        cu_seqlens.copy_(int32(new_bounds))
        y.fill_(SENTINEL)
        expected_pool, expected_y = pool.clone(), y.clone()
        run(expected_pool, expected_y)
        graph.replay()
        assert torch.equal(pool, expected_pool)
        assert torch.equal(y, expected_y)


def test_the_op_runs_on_the_current_stream_behind_what_is_queued_there() -> None:
    vectors = make_vectors(33, 12, torch.float16, DEVICE)
    expected_pool, pool = (make_pool(33, 12, torch.float16, DEVICE) for _ in range(2))
    expected_y, y = poisoned(33, 12, torch.float16), poisoned(33, 12, torch.float16)
    rows = (int32(list(range(34))), int32(list(range(33))))
    ops.wkv7_prefill(expected_pool, *vectors, *rows, expected_y)
    late = [torch.zeros_like(x) for x in vectors]
    torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock ticks: long enough for an op on another stream to come first
        for x, source in zip(late, vectors, strict=True):
            x.copy_(source)
        ops.wkv7_prefill(pool, *late, *rows, y)
    stream.synchronize()

    assert torch.equal(pool, expected_pool)
    assert torch.equal(y, expected_y)


def test_the_op_never_waits_for_the_device() -> None:
    vectors, pool = make_vectors(3, 4, torch.float16, DEVICE), make_pool(3, 4, torch.float16, DEVICE)
    slots, cu_seqlens, y = int32([0, 1, 2]), int32([0, 1, 2, 3]), poisoned(3, 4, torch.float16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.wkv7_prefill(pool, *vectors, cu_seqlens, slots, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_empty_batch_is_no_error() -> None:
    pool, none = make_pool(2, 4, torch.float16, DEVICE), make_vectors(0, 4, torch.float16, DEVICE)
    before = pool.clone()
    ops.wkv7_prefill(pool, *none, int32([0]), int32([]), poisoned(0, 4, torch.float16))
    assert torch.equal(pool, before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
def test_the_op_runs_on_the_tensors_card_whichever_is_current() -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        pool, y = make_pool(3, 4, torch.float16, device), poisoned(3, 4, torch.float16, device)
        rows = (int32([0, 1, 2, 3], device), int32([0, 1, 2], device))
        ops.wkv7_prefill(pool, *make_vectors(3, 4, torch.float16, device), *rows, y)
        results.append((pool.cpu(), y.cpu()))
    assert torch.cuda.current_device() == 0
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def prefill_args(**changes: torch.Tensor) -> list[torch.Tensor]:
    vectors = dict(zip("rwkvab", make_vectors(2, 3, torch.float16, DEVICE), strict=True))
    args = {"state": make_pool(4, 3, torch.float16, DEVICE), **vectors, "cu_seqlens": int32([0, 1, 2]), "slots": int32([0, 1])}
    return list({**args, "y": poisoned(2, 3, torch.float16), **changes}.values())


def half(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("state", half(4, 3, 64, 32), r"state must be .*\[S, H, 64, 64\].* found float16 \[4, 3, 64, 32\]"),
        ("state", half(4, 3, 64, 64).mT, "state must be .* contiguous within a slot, found .* strides"),
        ("state", half(4, 3, 64, 64, dtype=torch.bfloat16), "state must be float16 or float32 .* found bfloat16"),
        ("state", half(4, 3 * 64 * 64 + 1)[:, 1:].unflatten(1, (3, 64, 64)), "state must be strided by a multiple of 16 bytes"),
        ("state", half(1 + 3 * 64 * 64)[1:].view(1, 3, 64, 64), "state must begin at a multiple of 16 bytes, found"),
        ("r", half(2, 3, 64, dtype=torch.float64), "r must be float16 or float32, found float64"),
        ("k", half(2, 4, 64), r"k must be contiguous float16 \[T, H, 64\] = \[2, 3, 64\] .* found float16 \[2, 4, 64\]"),
        ("v", half(2, 3, 64, dtype=torch.float32), "v must be contiguous float16 .* found float32"),
        ("a", half(2 * 3 * 64 + 1)[1:].view(2, 3, 64), "a must begin at a multiple of 16 bytes"),
        ("y", half(2, 3, 128)[..., ::2], "y must be contiguous .* found .* strides"),
        ("slots", torch.zeros(2, dtype=torch.int64), "slots must be contiguous int32 .* found int64"),
        ("cu_seqlens", torch.zeros(2, dtype=torch.int32), r"cu_seqlens must be contiguous int32 \[R \+ 1\] = \[3\] .* found"),
    ],
)
def test_a_wrong_argument_is_refused_by_op_name_expected_and_found(name: str, value: torch.Tensor, words: str) -> None:
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
    if value.storage_offset():
        moved = torch.zeros(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device=DEVICE)
        moved = moved.as_strided(value.shape, value.stride(), value.storage_offset())
    with pytest.raises(RuntimeError, match="wkv7_prefill: " + words):
        ops.wkv7_prefill(*prefill_args(**{name: moved}))


def test_a_tensor_on_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"wkv7_prefill: slots must be .* on cuda:0, found int32 .* on cpu"):
        ops.wkv7_prefill(*prefill_args(slots=torch.zeros(2, dtype=torch.int32)))


def test_opcheck_accepts_the_cuda_implementation() -> None:
    pool, y = make_pool(4, 3, torch.float32, DEVICE), torch.zeros(2, 3, 64, dtype=torch.float16, device=DEVICE)
    vectors = make_vectors(2, 3, torch.float16, DEVICE)
    torch.library.opcheck(torch.ops.albatross.wkv7_prefill.default, (pool, *vectors, int32([0, 1, 2]), int32([2, 0]), y))


def test_loading_again_returns_the_library_that_is_open() -> None:
    assert ops.load_native(DEVICE) is ops.load_native("cuda:0")
