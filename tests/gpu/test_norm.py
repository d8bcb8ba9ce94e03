"""The CUDA kernels of the layer norms: against the float64 oracle, at any row lengths, and bit for bit where bits must agree."""

import pytest
import torch
from tmix_cases import Tensors, bounds, make_norm, make_shift, oracle_norm, oracle_norm_mix, rows_of, strided
from wkv7_cases import SENTINEL, relative_error, tolerance

from albatross import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a CUDA build of torch"),
]

DEVICE = "cuda"
DTYPES = [torch.float16, torch.float32]
WIDTHS = [64, 192, 256, 768, 2560, 4096, 4160, 8192]
LENGTHS = [[1], [1] * 3, [1] * 33, [1] * 257, [7], [64, 0, 5, 129, 1], [0, 2], [300, 1, 1800]]


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    ops.load_native(DEVICE)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def norm_mix(tensors: Tensors, shift: torch.Tensor, lengths: list[int], slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x, mix = tensors["x"], tensors["mix"]
    x_out = torch.full_like(x, float("nan"))
    mixed = torch.full((mix.shape[0], *x.shape), float("nan"), dtype=mix.dtype, device=DEVICE)
    rows = rows_of(lengths) + [max(len(lengths) - 1, 0)] * (x.shape[0] - sum(lengths))
    ops.add_norm_mix(*tensors.values(), shift, int32(bounds(lengths)), int32(rows), int32(slots), x_out, mixed)
    return x_out, mixed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}-rows-{sum(lengths)}-tokens")
def test_add_norm_mix_agrees_with_the_oracle(lengths: list[int], width: int, dtype: torch.dtype) -> None:
    tensors = make_norm(sum(lengths), width, 6 if width < 8192 else 1, dtype, DEVICE)
    shift = make_shift(len(lengths) + 2, width, dtype, DEVICE)
    slots = list(reversed(range(1, len(lengths) + 1)))
    expected = oracle_norm_mix(tensors, shift, lengths, slots)

    x_out, mixed = norm_mix(tensors, shift, lengths, slots)

    assert relative_error(x_out, expected[0]) < tolerance(torch.float32)
    assert relative_error(shift, expected[1]) < tolerance(dtype)
    assert relative_error(mixed, expected[2]) < 2 * tolerance(dtype)  # y is rounded, and mixed once more


@pytest.mark.parametrize("num_mixes", [1, 2, 8])
def test_any_number_of_mixes_works_with_and_without_delta(num_mixes: int) -> None:
    tensors = make_norm(9, 768, num_mixes, torch.float16, DEVICE) | {"delta": None}
    shift = make_shift(3, 768, torch.float16, DEVICE)
    expected = oracle_norm_mix(tensors, shift, [4, 5], [2, 0])

    x_out, mixed = norm_mix(tensors, shift, [4, 5], [2, 0])

    assert torch.equal(x_out, tensors["x"])
    assert relative_error(mixed, expected[2]) < 2 * tolerance(torch.float16)


@pytest.mark.parametrize("copies", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_empty_rows_and_tokens_past_the_last_row_leave_no_trace(copies: int, dtype: torch.dtype) -> None:
    lengths = [2, 0, 3, 1] * copies
    slots = [slot for copy in range(copies) for slot in (-1, 2 * copy, -5, 2 * copy + 1)]
    tensors = make_norm(sum(lengths) + 4, 768, 6, dtype, DEVICE)
    shift = torch.full((2 * copies + 1, 3, 768), SENTINEL, dtype=dtype, device=DEVICE)
    before = shift.clone()
    expected = oracle_norm_mix(tensors, shift[:, 1], lengths, slots)

    x_out, mixed = norm_mix(tensors, shift[:, 1], lengths, slots)

    assert relative_error(x_out, expected[0]) < tolerance(torch.float32)
    assert relative_error(mixed, expected[2]) < 2 * tolerance(dtype)
    written = torch.arange(1, 2 * copies, 2, device=DEVICE)  # those of the rows of one token
    assert relative_error(shift[written, 1], expected[1][written.cpu()]) < tolerance(dtype)
    shift[written, 1] = SENTINEL
    assert torch.equal(shift, before)


@pytest.mark.parametrize("mean", [-30.0, 1000.0])
def test_a_mean_far_from_zero_costs_no_more_than_its_own_rounding(mean: float) -> None:
    tensors = make_norm(3, 4096, 1, torch.float32, DEVICE) | {"delta": None}
    tensors["x"] = torch.randn(3, 4096, device=DEVICE) + mean
    shift = make_shift(3, 4096, torch.float32, DEVICE)
    expected = oracle_norm(tensors)[1]

    norm_mix(tensors, shift, [1, 1, 1], [0, 1, 2])

    assert float((shift.double().cpu() - expected).abs().max()) < 3e-6 + 1.5 * torch.finfo(torch.float32).eps * abs(mean)


@pytest.mark.parametrize("channel", [0, 1, 127, 128, 4095])
def test_one_channel_far_from_all_others_costs_no_precision(channel: int) -> None:
    tensors = make_norm(2, 4096, 1, torch.float32, DEVICE) | {"delta": None}
    tensors["x"][:, channel] = 1e4
    out = torch.full((2, 4096), float("nan"), device=DEVICE)
    expected = oracle_norm(tensors)[1]
    ops.add_norm(tensors["x"], None, tensors["ln_weight"], tensors["ln_bias"], torch.arange(2, device=DEVICE), out)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=4e-6, atol=1e-6)


def test_nan_in_one_token_stays_there() -> None:
    tensors, shift = make_norm(3, 768, 6, torch.float16, DEVICE), make_shift(3, 768, torch.float16, DEVICE)
    tensors["x"][1, 5] = float("nan")
    _, mixed = norm_mix(tensors, shift, [1, 1, 1], [0, 1, 2])
    assert torch.isnan(mixed[:, 1]).all()
    assert torch.isfinite(mixed[:, [0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_gets_the_same_bits_alone_in_any_batch_and_in_any_row(dtype: torch.dtype) -> None:
    tensors, shift = make_norm(2100, 2560, 6, dtype, DEVICE), make_shift(1, 2560, dtype, DEVICE)
    _, mixed = norm_mix(tensors, shift, [2100], [0])
    normalised = torch.full((2100, 2560), float("nan"), dtype=dtype, device=DEVICE)
    constants = (tensors["ln_weight"], tensors["ln_bias"])
    ops.add_norm(tensors["x"], tensors["delta"], *constants, torch.arange(2100, device=DEVICE), normalised)
    assert torch.equal(shift[0], normalised[-1])
    for token in (1, 7, 8, 1000, 2099):
        alone = {name: x[token : token + 1] if name in ("x", "delta") else x for name, x in tensors.items()}
        shift = normalised[token - 1 : token].clone()
        _, single = norm_mix(alone, shift, [1], [0])
        assert torch.equal(single[:, 0], mixed[:, token])
        assert torch.equal(shift[0], normalised[token])


def test_twenty_runs_give_the_same_bits() -> None:
    lengths = [37, 1, 0, 500, 8] * 5
    tensors, first = make_norm(sum(lengths), 768, 6, torch.float16, DEVICE), None
    for _ in range(20):
        shift = make_shift(len(lengths), 768, torch.float16, DEVICE)
        results = (*norm_mix(tensors, shift, lengths, list(range(len(lengths)))), shift)
        first = first or results
        assert all(torch.equal(x, y) for x, y in zip(results, first, strict=True))


def test_a_captured_graph_follows_new_inputs_slots_and_lengths() -> None:
    tensors, shift = make_norm(6, 768, 6, torch.float16, DEVICE), make_shift(8, 768, torch.float16, DEVICE)
    cu_seqlens, token_rows, slots = int32(list(range(7))), int32(list(range(6))), int32([-1] * 6)
    x_out, mixed = torch.zeros_like(tensors["x"]), torch.zeros(6, 6, 768, dtype=torch.float16, device=DEVICE)

    def run(shift: torch.Tensor, x_out: torch.Tensor, mixed: torch.Tensor) -> None:
        ops.add_norm_mix(*tensors.values(), shift, cu_seqlens, token_rows, slots, x_out, mixed)

    run(shift, x_out, mixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(shift, x_out, mixed)
    for seed, (new_slots, lengths) in enumerate([([3, -1, 0, 7, -1, 2], [1] * 6), ([5, 6, -2, 1, 4, 0], [0, 2, 0, 1, 3, 0])]):
        for name, source in make_norm(6, 768, 6, torch.float16, DEVICE, seed=seed).items():
            tensors[name].copy_(source)
        for target, values in ((slots, new_slots), (cu_seqlens, bounds(lengths)), (token_rows, rows_of(lengths))):
            target.copy_(int32(values))
        expected = [torch.empty_like(x).copy_(x) for x in (shift, x_out, mixed)]
        run(*expected)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip((shift, x_out, mixed), expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_norm_takes_the_tokens_of_the_index_in_its_order(width: int, dtype: torch.dtype) -> None:
    tensors = make_norm(260, width, 1, dtype, DEVICE)
    del tensors["mix"]
    index = torch.cat((torch.tensor([259, 0, 0]), torch.randperm(260)[:254])).to(DEVICE)
    out = strided(torch.full((257, width), float("nan"), dtype=dtype, device=DEVICE))

    ops.add_norm(*tensors.values(), index, out)

    assert relative_error(out, oracle_norm(tensors)[1][index.cpu()]) < tolerance(dtype)
