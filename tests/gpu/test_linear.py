"""The CUDA kernels of the matrix products: against float64, at shapes off every block size, and bit for bit in repeats."""

import pytest
import torch
from torch import Tensor

from albatross import ops
from albatross.constants import CMIX_BOUND, CMIX_SCALE
from albatross.models.linear import Linear, LowRank, Product
from albatross.ops.linear import grouped_linear, sparse_linear, workspace
from albatross.reference import linear as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a CUDA build of torch"),
]

DEVICE = torch.device("cuda")
ROWS = [1, 2, 3, 5, 8]
SHAPES = [(256, 256), (24, 96), (1000, 264), (2560, 2560), (65529, 768), (96, 8), (4096, 4096), (136, 16384)]  # N, K


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    ops.load_native(DEVICE)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float16)


def poisoned(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_product_agrees_with_float64(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = shape
    x, weight = randn(num_rows, k), randn(n, k) / k**0.5
    expected = x.double() @ weight.double().T
    out = poisoned(num_rows, n, dtype=dtype)
    grouped_linear([x], [weight], ["none"], [out])
    assert relative_error(out, expected) < (4e-4 if dtype == torch.float16 else 2e-6)
    assert not bool(workspace(DEVICE)[: 1 << 16].any())


@pytest.mark.parametrize("num_rows", ROWS)
def test_products_of_one_launch_stay_apart(num_rows: int) -> None:
    """Different K, N, activations and strides: the shapes of a layer's first projections, and of its low-rank ones."""
    mixed = randn(6, num_rows, 768)
    hidden, low = poisoned(num_rows, 320), poisoned(num_rows, 1600)
    sizes, names = [(768, 64), (768, 32), (768, 96), (768, 128), (768, 200)], ["tanh", "none", "sigmoid", "squared_relu", "none"]
    ends = [0, 64, 96, 192, 320]
    outs = [hidden[:, ends[i] : ends[i + 1]] for i in range(4)] + [low[:, 1000:1200]]
    weights = [randn(n, k) * (3 / k**0.5) for k, n in sizes]
    xs = [mixed[i] for i in range(5)]
    grouped_linear(xs, weights, names, outs)
    expected = [torch.empty(num_rows, n, device=DEVICE, dtype=torch.float64) for _, n in sizes]
    reference.grouped_linear([x.double() for x in xs], [w.double() for w in weights], names, expected)
    expected[3] = (expected[3].sqrt().clamp(max=CMIX_BOUND) * CMIX_SCALE).square()
    for out, each in zip(outs, expected, strict=True):
        assert relative_error(out, each) < 6e-4
    assert bool(low[:, :1000].isnan().all())
    assert bool(low[:, 1200:].isnan().all())


def test_products_of_one_launch_may_have_different_numbers_of_rows() -> None:
    x, weight, out = randn(29, 320), randn(200, 320) / 18, poisoned(29, 200)
    xs, outs = x.split(8), out.split(8)
    grouped_linear(xs * 8, [weight] * 32, ["tanh"] * 32, outs * 8)
    assert relative_error(out, torch.tanh(x.double() @ weight.double().T)) < 4e-4


@pytest.mark.parametrize("ranks", [(96, 128, 128, 480), (96, 96, 256)])
@pytest.mark.parametrize("num_rows", [100, 129, 1000])
def test_low_rank_products_by_torch_go_where_they_belong_without_a_copy(num_rows: int, ranks: tuple[int, ...]) -> None:
    """What cuBLAS could not write in place would go through memory of its own."""
    n, rank = len(ranks), max(ranks)
    x, rkv, down, up = randn(n, num_rows, 1024), randn(3, 1024, 1024) / 32, randn(n, rank, 1024) / 32, randn(n, 1024, rank) / 16
    for i, each in enumerate(ranks):
        down[i, each:], up[i, :, each:] = 0, 0
    out, hidden, loras = poisoned(3, num_rows, 1024), poisoned(n, num_rows, rank), poisoned(n, num_rows, 1024)
    main = Product(x[:3], rkv, out)
    low_rank = LowRank(x, down, hidden, up, loras, ranks, ["none"] * (n - 1) + ["sigmoid"])
    Linear().project(main, low_rank)  # cuBLAS takes its own workspace once
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    Linear().project(main, low_rank)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    first = x.double() @ down.double().mT
    first[-1].sigmoid_()
    assert relative_error(loras, first @ up.double().mT) < 2e-3


@pytest.mark.parametrize("num_rows", [1, 8])
def test_rows_of_x_may_be_strided(num_rows: int) -> None:
    wide = randn(num_rows, 1024)
    x, weight = wide[:, 256:512], randn(384, 256) / 16
    out = poisoned(num_rows, 384)
    grouped_linear([x], [weight], ["none"], [out])
    assert relative_error(out, x.double() @ weight.double().T) < 4e-4


def test_squared_relu_is_clamped_and_scaled() -> None:
    x, weight = torch.full((2, 64), 64.0, device=DEVICE).half(), torch.ones(8, 64, device=DEVICE).half()
    out = poisoned(2, 8)
    grouped_linear([x], [weight], ["squared_relu"], [out])
    assert torch.equal(out, torch.full_like(out, (CMIX_BOUND * CMIX_SCALE) ** 2))


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(256, 1024), (768, 3072), (2048, 8192), (4096, 16384), (2560, 10240), (136, 264)])  # C, F
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8])
def test_the_value_matrix_agrees_with_float64(num_rows: int, shape: tuple[int, int], density: float) -> None:
    n, k = shape
    x = randn(num_rows, k).square() * (torch.rand(num_rows, k, device=DEVICE) < density)
    weight = randn(k, n) / k**0.5
    expected = 64.0 * (x.double() @ weight.double())
    out = poisoned(num_rows, n)
    sparse_linear(x, weight, 64.0, out)
    assert relative_error(out, expected) < 4e-4


def test_a_nan_stays_in_its_row() -> None:
    x, weight = randn(4, 1024), randn(512, 1024) / 32
    x[2, 7] = float("nan")
    out = poisoned(4, 512)
    grouped_linear([x], [weight], ["none"], [out])
    assert bool(out[2].isnan().all())
    assert bool(out[[0, 1, 3]].isfinite().all())
    out = poisoned(4, 1024)
    sparse_linear(x, randn(1024, 1024), 1.0, out)
    assert bool(out[2].isnan().all())
    assert bool(out[[0, 1, 3]].isfinite().all())


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_repeats_are_equal_bit_for_bit(num_rows: int) -> None:
    x, weight, value = randn(num_rows, 2048), randn(1096, 2048), randn(2048, 1024)
    outs, values = ([poisoned(num_rows, n) for _ in range(50)] for n in (1096, 1024))
    for out, each in zip(outs, values, strict=True):
        grouped_linear([x], [weight], ["none"], [out])
        sparse_linear(x.relu(), value, 1.0, each)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert all(torch.equal(each, values[0]) for each in values)


@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_a_chain_in_a_graph_equals_the_chain_launched(num_rows: int) -> None:
    """Kernels that begin before the one before them has ended must still see all of its output."""
    weights = [randn(1024, 1024) / 32 for _ in range(12)]
    value = randn(1024, 1024) / 32

    def chain(x: Tensor) -> Tensor:
        for weight in weights:
            out, last = torch.empty_like(x), torch.empty_like(x)
            grouped_linear([x], [weight], ["none"], [out])
            sparse_linear(out, value, 1.0, last)
            x = last
        return x

    x = randn(num_rows, 1024)
    expected = chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(x)
    for _ in range(20):
        result.fill_(float("nan"))
        graph.replay()
        assert torch.equal(result, expected)


def test_opcheck_accepts_both_ops() -> None:
    x, weight, out, space = randn(3, 64), randn(40, 64), poisoned(3, 40), workspace(DEVICE)
    torch.library.opcheck(torch.ops.albatross.grouped_linear.default, ([x], [weight], [1], space, [out]))
    torch.library.opcheck(torch.ops.albatross.sparse_linear.default, (x, randn(64, 40), 2.0, space, out))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": [torch.zeros(9, 64, dtype=torch.float16)]}, "at most 8 rows"),
        ({"weight": [torch.zeros(40, 72, dtype=torch.float16)]}, "K = 64"),
        ({"weight": [torch.zeros(40, 64)]}, "weight must be float16"),
        ({"out": [torch.zeros(3, 41, dtype=torch.float16)]}, r"\[3, 40\]"),
        ({"out": []}, "lists of 1 to 32"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], text: str) -> None:
    arguments: dict[str, object] = {"x": [randn(3, 64)], "weight": [randn(40, 64)], "out": [poisoned(3, 40)]}
    moved = {name: [t.to(DEVICE) for t in value] if isinstance(value, list) else value for name, value in change.items()}
    if "x" in moved:
        moved["out"] = [poisoned(9, 40)]
    arguments.update(moved)
    with pytest.raises(RuntimeError, match=text):
        grouped_linear(arguments["x"], arguments["weight"], ["none"], arguments["out"])  # type: ignore[arg-type]
