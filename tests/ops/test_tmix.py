"""The ops between the matrix products on the CPU: against a float64 oracle, on awkward shapes, and as entries of torch's op
registry.
"""

from collections.abc import Callable

import pytest
import torch
from tmix_cases import (
    DECODE,
    OUTPUTS,
    PREFILL,
    PREPARE,
    READOUT,
    Tensors,
    bounds,
    doubles,
    make_norm,
    make_shift,
    make_tmix,
    oracle_decode,
    oracle_norm,
    oracle_norm_mix,
    oracle_prefill,
    oracle_prepare,
    oracle_readout,
    oracle_squared_relu,
    rows_of,
    strided,
)
from wkv7_cases import SENTINEL, make_pool, relative_error, tolerance

from albatross import ops
from albatross.ops.tmix import prefill_by_scan

DTYPES = [torch.float16, torch.float32]
HEADS = 3
WIDTH = HEADS * 64
MUTATED = {
    "add_norm_mix": {"shift", "x_out", "mixed"},
    "add_norm": {"out"},
    "tmix_decode": {"state", "out"},
    "tmix_prefill": {"state", "out", "segments"},
    "tmix_prepare": set(OUTPUTS),
    "tmix_readout": {"out"},
    "squared_relu": {"x"},
}


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def decode(pool: torch.Tensor, tensors: Tensors, slots: list[int]) -> torch.Tensor:
    out = strided(poisoned(*tensors["r"].shape, dtype=tensors["r"].dtype))
    arguments = {**tensors, "state": pool, "slots": int32(slots), "out": out}
    ops.tmix_decode(*(arguments[name] for name in DECODE))
    return out


def norm_mix(tensors: Tensors, shift: torch.Tensor, lengths: list[int], slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x, mix = tensors["x"], tensors["mix"]
    x_out, mixed = poisoned(*x.shape, dtype=x.dtype), poisoned(len(mix), *x.shape, dtype=mix.dtype)
    ops.add_norm_mix(*tensors.values(), shift, int32(bounds(lengths)), int32(rows_of(lengths)), int32(slots), x_out, mixed)
    return x_out, mixed


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(
    ("op", "dtype"), [*((ops.tmix_prefill, dtype) for dtype in DTYPES), (prefill_by_scan, torch.float32)]
)
def test_prefill_agrees_with_the_oracle_and_leaves_padding_and_what_follows_alone(
    dtype: torch.dtype, is_gated: bool, op: Callable[..., None]
) -> None:
    lengths, slots = [17, 0, 1, 5, 40], [3, 0, 1, -1, 6]
    pool, tensors = make_pool(8, HEADS, dtype), make_tmix(sum(lengths) + 2, HEADS, dtype, is_gated=is_gated)
    expected_pool, expected_out = oracle_prefill(pool, tensors, [*lengths, 2], [*slots, -1])
    out = strided(torch.full((sum(lengths) + 2, WIDTH), SENTINEL, dtype=dtype))

    arguments = {**tensors, "state": pool, "cu_seqlens": int32(bounds(lengths)), "slots": int32(slots), "out": out}
    op(*(arguments[name] for name in PREFILL))

    is_written = ~expected_out.isnan()
    assert relative_error(pool, expected_pool) < tolerance(dtype, max(lengths))
    assert relative_error(out[is_written], expected_out[is_written]) < tolerance(dtype, max(lengths))
    assert (out[~is_written] == SENTINEL).all()


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 33])
def test_decode_agrees_with_the_oracle(num_rows: int, dtype: torch.dtype, state_dtype: torch.dtype, is_gated: bool) -> None:
    pool = make_pool(num_rows + 2, HEADS, state_dtype)
    tensors = make_tmix(num_rows, HEADS, dtype, is_gated=is_gated)
    slots = torch.randperm(num_rows + 2, generator=torch.Generator().manual_seed(2))[:num_rows].tolist()
    expected_pool, expected_out = oracle_decode(pool, tensors, slots)

    out = decode(pool, tensors, slots)

    assert relative_error(pool, expected_pool) < tolerance(state_dtype)
    assert relative_error(out, expected_out) < tolerance(dtype)


def test_decode_leaves_states_of_padding_rows_other_slots_and_other_layers_untouched() -> None:
    pool = torch.full((4, 3, HEADS, 64, 64), SENTINEL)
    before = pool.clone()
    tensors = make_tmix(3, HEADS, torch.float32)
    for name in ("r", "k", "v", "w", "a", "g"):
        tensors[name][1] = float("nan")  # a padding row's inputs may hold anything

    out = decode(pool[:, 1], tensors, [2, -1, 0])

    pool[[0, 2], 1] = SENTINEL
    assert torch.equal(pool, before)
    assert (out[1] == 0).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_prepare_agrees_with_the_oracle(num_tokens: int, dtype: torch.dtype, is_gated: bool) -> None:
    tensors = make_tmix(num_tokens, HEADS, dtype, is_gated=is_gated)
    outputs = {name: poisoned(num_tokens, WIDTH, dtype=dtype) for name in OUTPUTS}

    ops.tmix_prepare(*(tensors[name] for name in PREPARE), *outputs.values())

    for name, expected in oracle_prepare(tensors).items():
        assert relative_error(outputs[name], expected.flatten(1)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_readout_agrees_with_the_oracle(dtype: torch.dtype) -> None:
    tensors = make_tmix(5, HEADS, dtype)
    y = strided((3 * torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(4)) + 1).to(dtype))
    out = strided(poisoned(5, WIDTH, dtype=dtype))

    ops.tmix_readout(y, *(tensors[name] for name in ("r", "k", "v", "g", *READOUT)), out)

    heads = doubles({"y": y, "k": tensors["k"], "v": tensors["v"]})
    assert relative_error(out, oracle_readout(heads["y"], heads["k"], heads["v"], tensors)) < tolerance(dtype)


def test_prepare_recurrence_and_readout_of_one_token_a_row_are_decode() -> None:
    tensors = make_tmix(4, HEADS, torch.float32)
    pools = [make_pool(4, HEADS, torch.float32) for _ in range(2)]
    slots = [3, 1, 0, 2]
    expected = decode(pools[0], tensors, slots)

    w, k, v, minus_kk, b = outputs = poisoned(5, 4, WIDTH, dtype=torch.float32).unbind()
    ops.tmix_prepare(*(tensors[name] for name in PREPARE), *outputs)
    y, r = poisoned(4, HEADS, 64, dtype=torch.float32), tensors["r"].contiguous()
    inputs = [x.view(4, HEADS, 64) for x in (r, w, k, v, minus_kk, b)]
    ops.wkv7_prefill(pools[1], *inputs, int32([0, 1, 2, 3, 4]), int32(slots), y)
    out = poisoned(4, WIDTH, dtype=torch.float32)
    ops.tmix_readout(y.flatten(1), r, k, v, *(tensors[name] for name in ("g", *READOUT)), out)

    torch.testing.assert_close(pools[1], pools[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("num_mixes", [1, 6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[1], [1] * 5, [4, 0, 1, 3], [0, 2], [9]])
def test_add_norm_mix_agrees_with_the_oracle(lengths: list[int], dtype: torch.dtype, num_mixes: int, has_delta: bool) -> None:
    tensors = make_norm(sum(lengths), WIDTH, num_mixes, dtype)
    if not has_delta:
        tensors["delta"] = None
    shift = make_shift(len(lengths) + 1, WIDTH, dtype)
    slots = list(reversed(range(len(lengths))))
    expected = oracle_norm_mix(tensors, shift, lengths, slots)

    x_out, mixed = norm_mix(tensors, shift, lengths, slots)

    assert relative_error(x_out, expected[0]) < tolerance(torch.float32)
    assert relative_error(shift, expected[1]) < tolerance(dtype)
    assert relative_error(mixed, expected[2]) < 2 * tolerance(dtype)  # y is rounded, and mixed once more


def test_add_norm_mix_leaves_no_trace_of_padding_rows_and_empty_rows() -> None:
    lengths, slots = [2, 0, 3, 1], [-1, 2, -5, 0]
    tensors = make_norm(6, WIDTH, 2, torch.float32)
    shift = torch.full((4, 3, WIDTH), SENTINEL)
    before = shift.clone()
    expected = oracle_norm_mix(tensors, shift[:, 1], lengths, slots)

    _, mixed = norm_mix(tensors, shift[:, 1], lengths, slots)

    assert relative_error(mixed, expected[2]) < tolerance(torch.float32)
    assert relative_error(shift[0, 1], expected[1][0]) < tolerance(torch.float32)
    shift[0, 1] = SENTINEL
    assert torch.equal(shift, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_takes_the_tokens_of_the_index_in_its_order(dtype: torch.dtype) -> None:
    tensors = make_norm(6, WIDTH, 1, dtype)
    del tensors["mix"]
    index = torch.tensor([5, 0, 0, 3])
    out = strided(poisoned(4, WIDTH, dtype=dtype))

    ops.add_norm(*tensors.values(), index, out)

    assert relative_error(out, oracle_norm(tensors)[1][index]) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_relu_agrees_with_the_oracle_and_keeps_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.0, -0.0, 0.0, 0.25, 200.0, 2047.0, 2048.0, 65504.0, float("-inf"), float("nan")]).to(dtype)
    expected = oracle_squared_relu(x)

    ops.squared_relu(x)

    torch.testing.assert_close(x.double(), expected, rtol=tolerance(dtype), atol=0, equal_nan=True)


def opcheck_arguments() -> dict[str, tuple[torch.Tensor | None, ...]]:
    tensors, norm = make_tmix(3, HEADS, torch.float16), make_norm(4, WIDTH, 2, torch.float16)
    mix = norm.pop("mix")
    half = torch.float16
    rows = (int32([0, 3, 4]), int32([0, 0, 0, 1]), int32([1, -1]))
    arguments = {**tensors, "state": make_pool(4, HEADS, torch.float32), "slots": int32([2, -1, 0])}
    arguments["out"] = torch.zeros(3, WIDTH, dtype=half)
    outputs = torch.zeros(5, 3, WIDTH, dtype=half).unbind()
    return {
        "add_norm_mix": (
            *norm.values(),
            mix,
            make_shift(3, WIDTH, half),
            *rows,
            torch.zeros(4, WIDTH),
            torch.zeros(2, 4, WIDTH, dtype=half),
        ),
        "add_norm": (*norm.values(), torch.tensor([3, 1]), torch.zeros(2, WIDTH, dtype=half)),
        "tmix_decode": tuple(arguments[name] for name in DECODE),
        "tmix_prefill": (
            *({**arguments, "cu_seqlens": int32([0, 2, 2, 3])}[name] for name in PREFILL),
            torch.zeros(2, HEADS, 2, 64, 64),
        ),
        "tmix_prepare": (*(tensors[name] for name in PREPARE), *outputs),
        "tmix_readout": (*(arguments[name] for name in ("v_first", "r", "k", "v", "g", *READOUT, "out")),),
        "squared_relu": (torch.ones(3, 5, dtype=half),),
    }


def test_on_the_cpu_no_sequence_is_split() -> None:
    assert ops.segment_room(HEADS, 100_000, torch.device("cpu")) is None


@pytest.mark.parametrize("op", MUTATED)
def test_opcheck_accepts_the_op(op: str) -> None:
    torch.library.opcheck(getattr(torch.ops.albatross, op).default, opcheck_arguments()[op])


@pytest.mark.parametrize("op", MUTATED)
def test_the_schema_declares_what_is_mutated(op: str) -> None:
    schema = getattr(torch.ops.albatross, op).default._schema
    assert {x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write} == MUTATED[op]
    assert schema.returns == []


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def single(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


REFUSALS = {
    "tmix_decode": [
        ("state", single(4, HEADS, 64, 32), r"state must be .*\[S, H, 64, 64\].* found float32 \[4, 3, 64, 32\]"),
        ("state", single(4, HEADS, 64, 64).mT, "state must be .* contiguous within a slot, found .* strides"),
        ("state", single(4, HEADS, 64, 64, dtype=torch.bfloat16), "state must be float16 or float32 .* found bfloat16"),
        ("state", single(4, HEADS + 1, 64, 64), r"r must be \[T, C\] with C = 256 on cpu, found .*\[3, 192\]"),
        ("r", single(3, WIDTH, dtype=torch.float64), "r must be float16 or float32 .* found float64"),
        ("k", single(3, WIDTH), r"k must be float16 \[T, C\] = \[3, 192\] .* found float32"),
        ("v", half(2, WIDTH), r"v must be float16 \[T, C\] = \[3, 192\] .* found float16 \[2, 192\]"),
        ("g", half(3, WIDTH + 4)[:, :WIDTH], "g must be .* rows a multiple of 8 numbers apart, found .* strides"),
        ("w", half(3, 2 * WIDTH)[:, ::2], "w must be .* found .* strides"),
        ("w0", half(WIDTH), r"w0 must be contiguous float32 \[C\] = \[192\] .* found float16"),
        ("r_k", single(WIDTH), r"r_k must be contiguous float32 \[H, 64\] = \[3, 64\] .* found float32 \[192\]"),
        ("v0", None, "v_gate, v_first and v0 must be given together"),
        ("slots", single(3, dtype=torch.int64), "slots must be contiguous int32 .* found int64"),
        ("slots", int32([0, 1]), r"slots must be contiguous int32 \[T\] = \[3\] .* found int32 \[2\]"),
    ],
    "tmix_prefill": [
        ("r", single(3, WIDTH, dtype=torch.float64), "r must be float16 or float32 .* found float64"),
        ("state", single(4, HEADS + 1, 64, 64), r"r must be \[T, C\] with C = 256 on cpu, found .*\[3, 192\]"),
        ("v_first", None, "v_gate, v_first and v0 must be given together"),
        ("slots", single(3, dtype=torch.int64), r"slots must be contiguous int32 \[R\] .* found int64"),
        ("cu_seqlens", int32([0, 3]), r"cu_seqlens must be contiguous int32 \[R \+ 1\] = \[4\] .* found int32 \[2\]"),
        ("out", half(2, WIDTH), r"out must be float16 \[T, C\] = \[3, 192\] .* found"),
        ("segments", single(2, HEADS, 64, 64), r"segments must be contiguous float32 \[N, H, 2, 64, 64\] = \[2, 3, 2, 64, 64\]"),
        ("segments", half(2, HEADS, 2, 64, 64), "segments must be contiguous float32 .* found float16"),
    ],
    "tmix_prepare": [
        ("k", half(3, 100), "k must be .* C a multiple of 64, found"),
        ("b", half(3, 2 * WIDTH)[:, :WIDTH], "b must be contiguous float16 .* found .* strides"),
        ("v_gate", None, "v_gate, v_first and v0 must be given together"),
    ],
    "tmix_readout": [
        ("y", half(WIDTH), r"y must be .* \[T, C\] .* found float16 \[192\]"),
        ("out", half(3, WIDTH + 64), r"out must be float16 \[T, C\] = \[3, 192\] .* found"),
    ],
    "add_norm_mix": [
        ("x", half(4, WIDTH), "x must be contiguous float32 .* found float16"),
        ("mix", single(9, WIDTH), r"mix must be .* M from 1 to 8, found float32 \[9, 192\]"),
        ("delta", single(4, WIDTH), "delta must be float16 .* found float32"),
        ("shift", single(3, WIDTH), r"shift must be float16 \[S, C\] .* found float32"),
        ("cu_seqlens", int32([0, 4]), r"cu_seqlens must be contiguous int32 \[R \+ 1\] = \[3\]"),
        ("token_rows", int32([0]), r"token_rows must be contiguous int32 \[T\] = \[4\]"),
        ("mixed", half(2, 5, WIDTH), r"mixed must be contiguous float16 \[M, T, C\] = \[2, 4, 192\]"),
    ],
    "add_norm": [
        ("index", int32([0, 1]), "index must be contiguous int64 .* found int32"),
        ("out", half(3, WIDTH), r"out must be float16 \[K, C\] = \[2, 192\]"),
    ],
    "squared_relu": [("x", single(4, 4).T[:, :2], "x must be contiguous .* found .* strides")],
}


@pytest.mark.parametrize(("op", "name", "value", "words"), [(op, *case) for op, cases in REFUSALS.items() for case in cases])
def test_a_wrong_argument_is_refused_by_op_name_expected_and_found(
    op: str, name: str, value: torch.Tensor | None, words: str
) -> None:
    names = [x.name for x in getattr(torch.ops.albatross, op).default._schema.arguments]
    arguments = dict(zip(names, opcheck_arguments()[op], strict=True)) | {name: value}
    with pytest.raises(RuntimeError, match=f"{op}: {words}"):
        getattr(ops, op)(*arguments.values())
