"""The WKV-7 op on the CPU: against a float64 oracle, on awkward shapes, and as an entry of torch's op registry."""

import itertools

import pytest
import torch
from wkv7_cases import SENTINEL, make_pool, make_vectors, oracle_rows, relative_error, tolerance

from albatross import ops

DTYPES = [torch.float16, torch.float32]
HEADS = 3


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bounds(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[1], [19], [5, 0, 17, 1, 8], [0, 3], [1] * 33])
def test_prefill_agrees_with_the_oracle(lengths: list[int], dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    pool = make_pool(len(lengths), HEADS, state_dtype)
    vectors = make_vectors(sum(lengths), HEADS, dtype)
    slots = list(reversed(range(len(lengths))))
    y = torch.full((sum(lengths), HEADS, 64), float("nan"), dtype=dtype)
    expected_pool, expected_y = oracle_rows(pool, vectors, bounds(lengths), slots, y)

    ops.wkv7_prefill(pool, *vectors, int32(bounds(lengths)), int32(slots), y)

    assert relative_error(pool, expected_pool) < tolerance(state_dtype, max(lengths))
    assert relative_error(y, expected_y) < tolerance(dtype, max(lengths))


def test_prefill_leaves_padding_rows_empty_rows_and_tokens_past_the_end_untouched() -> None:
    pool = torch.full((4, 3, HEADS, 64, 64), SENTINEL)
    before = pool.clone()
    vectors = make_vectors(9, HEADS, torch.float32)
    y = torch.full((9, HEADS, 64), SENTINEL)

    ops.wkv7_prefill(pool[:, 1], *vectors, int32([0, 4, 6, 6]), int32([3, -7, 1]), y)

    pool[3, 1] = SENTINEL
    assert torch.equal(pool, before)
    assert (y[4:] == SENTINEL).all()
    assert not (y[:4] == SENTINEL).any()


def test_a_prefill_of_no_live_row_changes_nothing() -> None:
    pool = make_pool(2, HEADS, torch.float16)
    before, y = pool.clone(), torch.full((0, HEADS, 64), SENTINEL)

    ops.wkv7_prefill(pool, *make_vectors(0, HEADS, torch.float32), int32([0, 0, 0]), int32([0, -1]), y)

    assert torch.equal(pool, before)


@pytest.mark.parametrize("cut", [0, 1, 8, 12, 20])
def test_a_prefill_cut_anywhere_leaves_the_same_state(cut: int) -> None:
    vectors = make_vectors(20, HEADS, torch.float32)
    whole, parts = make_pool(1, HEADS, torch.float32), make_pool(1, HEADS, torch.float32)
    y_whole, y_parts = torch.empty(2, 20, HEADS, 64)

    ops.wkv7_prefill(whole, *vectors, int32([0, 20]), int32([0]), y_whole)
    for part in (slice(0, cut), slice(cut, 20)):
        length = part.stop - part.start
        ops.wkv7_prefill(parts, *(x[part] for x in vectors), int32([0, length]), int32([0]), y_parts[part])

    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(y_parts, y_whole, rtol=0, atol=1e-5)


def test_repeated_runs_are_bitwise_equal() -> None:
    vectors = make_vectors(12, HEADS, torch.float16)
    results = []
    for _ in range(5):
        pool, y = make_pool(2, HEADS, torch.float16), torch.empty(12, HEADS, 64, dtype=torch.float16)
        ops.wkv7_prefill(pool, *vectors, int32([0, 7, 12]), int32([1, 0]), y)
        results.append((pool, y))
    assert all(torch.equal(pool, results[0][0]) and torch.equal(y, results[0][1]) for pool, y in results)


def test_opcheck_accepts_prefill() -> None:
    vectors = make_vectors(5, HEADS, torch.float16)
    y = torch.zeros(5, HEADS, 64, dtype=torch.float16)
    args = (make_pool(4, HEADS, torch.float32), *vectors, int32([0, 2, 5]), int32([3, 1]), y)
    torch.library.opcheck(torch.ops.albatross.wkv7_prefill.default, args)


def test_the_schema_declares_what_is_mutated() -> None:
    schema = torch.ops.albatross.wkv7_prefill.default._schema
    assert {x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write} == {"state", "y"}
    assert schema.returns == []


def prefill_args(**changes: torch.Tensor) -> list[torch.Tensor]:
    vectors = dict(zip("rwkvab", make_vectors(2, HEADS, torch.float32), strict=True))
    args = {"state": make_pool(4, HEADS, torch.float32), **vectors, "cu_seqlens": int32([0, 1, 2]), "slots": int32([0, 1])}
    return list({**args, "y": torch.zeros(2, HEADS, 64), **changes}.values())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("state", torch.zeros(4, HEADS, 64, 32), r"state must be .*\[S, H, 64, 64\].* found float32 \[4, 3, 64, 32\]"),
        ("state", torch.zeros(4, HEADS, 64, 64).mT, "state must be .* contiguous within a slot, found .* strides"),
        ("state", torch.zeros(4, HEADS, 64, 64, dtype=torch.bfloat16), "state must be float16 or float32 .* found bfloat16"),
        ("r", torch.zeros(2, HEADS, 64, dtype=torch.float64), "r must be float16 or float32, found float64"),
        ("k", torch.zeros(2, HEADS + 1, 64), r"k must be contiguous float32 \[T, H, 64\] = \[2, 3, 64\] .* found .*\[2, 4"),
        ("v", torch.zeros(2, HEADS, 64, dtype=torch.float16), "v must be contiguous float32 .* found float16"),
        ("y", torch.zeros(2, HEADS, 128)[..., ::2], "y must be contiguous .* found .* strides"),
        ("slots", torch.zeros(2, dtype=torch.int64), "slots must be contiguous int32 .* found int64"),
        ("cu_seqlens", int32([0, 2]), r"cu_seqlens must be contiguous int32 \[R \+ 1\] = \[3\] .* found int32 \[2\]"),
    ],
)
def test_a_wrong_argument_is_refused_by_op_name_expected_and_found(name: str, value: torch.Tensor, words: str) -> None:
    with pytest.raises(RuntimeError, match="wkv7_prefill: " + words):
        ops.wkv7_prefill(*prefill_args(**{name: value}))
