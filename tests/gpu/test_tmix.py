"""The CUDA kernels of time mixing but for the recurrence over sequences: against the float64 oracle, in graphs, behind each
other, and bit for bit where bits must agree.
"""

import pytest
import torch
from tmix_cases import (
    DECODE,
    OUTPUTS,
    PREPARE,
    READOUT,
    Tensors,
    doubles,
    make_norm,
    make_tmix,
    oracle_decode,
    oracle_prepare,
    oracle_readout,
    oracle_squared_relu,
    strided,
)
from wkv7_cases import SENTINEL, make_pool, make_spaced_pool, relative_error, tolerance

from albatross import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a CUDA build of torch"),
]

DEVICE = "cuda"
DTYPES = [torch.float16, torch.float32]
NUM_HEADS = [4, 12, 40, 64]


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    ops.load_native(DEVICE)


def int32(values: list[int], device: str = DEVICE) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def shuffled_slots(num_rows: int) -> list[int]:
    return torch.randperm(num_rows + 2, generator=torch.Generator().manual_seed(2))[:num_rows].tolist()


def poisoned(*shape: int, dtype: torch.dtype, device: str = DEVICE) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def decode(pool: torch.Tensor, tensors: Tensors, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    r = tensors["r"]
    if out is None:
        out = strided(poisoned(*r.shape, dtype=r.dtype, device=str(r.device)))
    arguments = {**tensors, "state": pool, "slots": slots, "out": out}
    ops.tmix_decode(*(arguments[name] for name in DECODE))
    return out


def prepare(tensors: Tensors) -> dict[str, torch.Tensor]:
    outputs = {name: poisoned(*tensors["k"].shape, dtype=tensors["k"].dtype) for name in OUTPUTS}
    ops.tmix_prepare(*(tensors[name] for name in PREPARE), *outputs.values())
    return outputs


def rows_of(tensors: Tensors, rows: slice) -> Tensors:
    """The same call with only some of the tokens."""
    return {name: x[rows] if x is not None and x.dim() == 2 and name != "r_k" else x for name, x in tensors.items()}


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", NUM_HEADS)
@pytest.mark.parametrize("num_rows", [1, 3, 33, 257])
def test_decode_agrees_with_the_oracle(num_rows: int, num_heads: int, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    pool = make_pool(num_rows + 2, num_heads, state_dtype, DEVICE)
    tensors, slots = make_tmix(num_rows, num_heads, dtype, DEVICE), shuffled_slots(num_rows)
    expected_pool, expected_out = oracle_decode(pool, tensors, slots)

    out = decode(pool, tensors, int32(slots))

    assert relative_error(pool, expected_pool) < tolerance(state_dtype)
    assert relative_error(out, expected_out) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_layer_0_mixes_no_value(dtype: torch.dtype) -> None:
    pool, tensors = make_pool(5, 12, torch.float32, DEVICE), make_tmix(5, 12, dtype, DEVICE, is_gated=False)
    expected_pool, expected_out = oracle_decode(pool, tensors, [4, 3, 2, 1, 0])

    out = decode(pool, tensors, int32([4, 3, 2, 1, 0]))

    assert relative_error(pool, expected_pool) < tolerance(torch.float32)
    assert relative_error(out, expected_out) < tolerance(dtype)


@pytest.mark.parametrize("size", [-60000.0, 60000.0])
def test_gates_at_their_limits_give_finite_numbers(size: float) -> None:
    pool, tensors = make_pool(3, 4, torch.float32, DEVICE), make_tmix(3, 4, torch.float16, DEVICE)
    for name in ("w", "a", "v_gate"):
        tensors[name].fill_(size)
    expected_pool, expected_out = oracle_decode(pool, tensors, [0, 1, 2])

    out = decode(pool, tensors, int32([0, 1, 2]))

    assert relative_error(pool, expected_pool) < tolerance(torch.float32)
    assert relative_error(out, expected_out) < tolerance(torch.float16)
    assert all(torch.isfinite(x).all() for x in prepare(tensors).values())


def test_a_key_of_zeros_gives_finite_numbers() -> None:
    pool, tensors = make_pool(2, 4, torch.float32, DEVICE), make_tmix(2, 4, torch.float16, DEVICE)
    tensors["k"].zero_()
    out = decode(pool, tensors, int32([0, 1]))
    assert torch.isfinite(pool).all()
    assert torch.isfinite(out).all()
    assert not prepare(tensors)["b"].any()


@pytest.mark.parametrize("state_dtype", DTYPES)
def test_decode_leaves_states_of_padding_rows_other_slots_and_other_layers_untouched(state_dtype: torch.dtype) -> None:
    pool = torch.full((4, 3, 5, 64, 64), SENTINEL, dtype=state_dtype, device=DEVICE)
    before = pool.clone()
    tensors = make_tmix(3, 5, torch.float16, DEVICE)
    for name in ("r", "k", "v", "w", "a", "g"):
        tensors[name][1] = float("nan")  # a padding row's inputs may hold anything

    out = decode(pool[:, 1], tensors, int32([2, -1, 0]))

    pool[[0, 2], 1] = SENTINEL
    assert torch.equal(pool, before)
    assert (out[1] == 0).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("gap", [8, 4096, 12345 * 8])
def test_any_distance_between_slots_works(gap: int) -> None:
    pool, between = make_spaced_pool(5, 4, gap, torch.float16, DEVICE)
    tensors = make_tmix(3, 4, torch.float16, DEVICE)
    expected_pool, expected_out = oracle_decode(pool, tensors, [4, 0, 2])

    out = decode(pool, tensors, int32([4, 0, 2]))

    assert relative_error(pool, expected_pool) < tolerance(torch.float16)
    assert relative_error(out, expected_out) < tolerance(torch.float16)
    assert (between == SENTINEL).all()


def test_a_row_gets_the_same_bits_alone_and_in_any_batch() -> None:
    tensors = make_tmix(257, 12, torch.float16, DEVICE)
    together, alone = (make_pool(257, 12, torch.float16, DEVICE) for _ in range(2))
    out, prepared = decode(together, tensors, int32(list(range(257)))), prepare(tensors)
    for row in (0, 100, 256):
        single = rows_of(tensors, slice(row, row + 1))
        assert torch.equal(decode(alone, single, int32([row]))[0], out[row])
        assert torch.equal(alone[row], together[row])
        assert all(torch.equal(x[0], prepared[name][row]) for name, x in prepare(single).items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [1, 3, *NUM_HEADS])
@pytest.mark.parametrize("num_tokens", [1, 3, 33, 257, 1025])
def test_prepare_and_readout_agree_with_the_oracle(num_tokens: int, num_heads: int, dtype: torch.dtype) -> None:
    tensors = make_tmix(num_tokens, num_heads, dtype, DEVICE, is_gated=num_tokens != 3)
    y = strided((3 * torch.randn(num_tokens, 64 * num_heads, device=DEVICE) + 1).to(dtype))
    out = strided(torch.full_like(y, float("nan")).contiguous())

    outputs = prepare(tensors)
    ops.tmix_readout(y, *(tensors[name] for name in ("r", "k", "v", "g", *READOUT)), out)

    for name, expected in oracle_prepare(tensors).items():
        assert relative_error(outputs[name], expected.flatten(1)) < tolerance(dtype)
    heads = doubles({"y": y, "k": tensors["k"], "v": tensors["v"]})
    assert relative_error(out, oracle_readout(heads["y"], heads["k"], heads["v"], tensors)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (4099,), (3, 16384), (960, 3072)])
def test_squared_relu_agrees_with_the_oracle(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = torch.full((torch.Size(shape).numel() + 64,), SENTINEL, dtype=dtype, device=DEVICE)
    x = memory[: torch.Size(shape).numel()].view(shape)
    x.copy_(1000 * torch.randn(shape, device=DEVICE))
    x.view(-1)[-1] = float("nan")
    expected = oracle_squared_relu(x)

    ops.squared_relu(x)

    subnormal = 3e-8  # half the distance of the smallest fp16 numbers
    torch.testing.assert_close(x.double().cpu(), expected, rtol=tolerance(dtype), atol=subnormal, equal_nan=True)
    assert (memory[x.numel() :] == SENTINEL).all()


def test_twenty_runs_give_the_same_bits() -> None:
    tensors, slots = make_tmix(65, 12, torch.float16, DEVICE), int32(list(range(65)))
    first = None
    for _ in range(20):
        pool = make_pool(65, 12, torch.float16, DEVICE)
        results = [decode(pool, tensors, slots), pool, *prepare(tensors).values()]
        first = first or results
        assert all(torch.equal(x, y) for x, y in zip(results, first, strict=True))


class Layer:
    """Ops that follow each other as in a decode step, each reading what the one before wrote."""

    def __init__(self, num_rows: int) -> None:
        self.tensors = make_tmix(num_rows, 12, torch.float16, DEVICE)
        self.tensors["r_k"].mul_(0.01)  # or else the numbers grow past float16 within a few rounds, as no matrix damps them
        self.norm = make_norm(num_rows, 768, 6, torch.float16, DEVICE)
        self.rows = (int32(list(range(num_rows + 1))), int32(list(range(num_rows))), int32(list(range(num_rows))))
        self.pool, self.shift = make_pool(num_rows, 12, torch.float16, DEVICE), torch.zeros(num_rows, 768, device=DEVICE).half()
        self.x, self.x_out = self.norm["x"].clone(), torch.zeros(num_rows, 768, device=DEVICE)
        self.mixed = torch.zeros(6, num_rows, 768, dtype=torch.float16, device=DEVICE)
        self.out = torch.zeros(num_rows, 768, dtype=torch.float16, device=DEVICE)

    def run(self, *, wait: bool) -> None:
        constants = (self.norm["ln_weight"], self.norm["ln_bias"])
        for _ in range(20):
            ops.add_norm_mix(self.x, self.out, *constants, self.norm["mix"], self.shift, *self.rows, self.x_out, self.mixed)
            _ = torch.cuda.synchronize() if wait else None
            products = dict(zip(("r", "k", "v", "w", "a", "g"), self.mixed, strict=True))
            decode(self.pool, {**self.tensors, **products}, self.rows[2], self.out)
            _ = torch.cuda.synchronize() if wait else None
            self.x, self.x_out = self.x_out, self.x

    def results(self) -> list[torch.Tensor]:
        return [self.pool, self.shift, self.x, self.x_out, self.mixed, self.out]


@pytest.mark.parametrize("num_rows", [1, 5, 300])
def test_ops_that_follow_each_other_closely_give_the_bits_of_ops_that_wait(num_rows: int) -> None:
    patient, hasty, captured = (Layer(num_rows) for _ in range(3))
    patient.run(wait=True)
    hasty.run(wait=False)
    assert all(x.isfinite().all() for x in patient.results())
    before = [x.clone() for x in captured.results()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(wait=False)
    for _ in range(3):
        for x, value in zip(captured.results(), before, strict=True):
            x.copy_(value)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured.results(), patient.results(), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(hasty.results(), patient.results(), strict=True))


def test_a_captured_graph_follows_new_inputs_and_slots() -> None:
    tensors, pool = make_tmix(6, 12, torch.float16, DEVICE), make_pool(8, 12, torch.float32, DEVICE)
    slots, out = int32([-1] * 6), poisoned(6, 768, dtype=torch.float16)
    decode(pool, tensors, slots, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(pool, tensors, slots, out)
    for seed, new_slots in enumerate([[3, -1, 0, 7, -1, 2], [5, 6, -2, 1, 4, 0]]):
        for name, source in make_tmix(6, 12, torch.float16, DEVICE, seed=seed).items():
            tensors[name].copy_(source)
        slots.copy_(int32(new_slots))
        expected_pool = pool.clone()
        expected_out = decode(expected_pool, tensors, slots)
        graph.replay()
        assert torch.equal(pool, expected_pool)
        assert torch.equal(out, expected_out)
