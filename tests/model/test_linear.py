"""Which kernel computes which product must change nothing but the time: every choice against float64, on the ops' CPU side."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from albatross.constants import CMIX_SCALE
from albatross.models.linear import Activation, Linear, LowRank, NativeLinear, Product
from albatross.models.tuning import Defaults, Rule, Tuning

C, HIDDEN, RANKS = 128, 256, (32, 8, 24)
ACTIVATIONS: tuple[Activation, ...] = ("none", "tanh", "none", "sigmoid")  # of v, w, a, g
FUNCTIONS = {"none": lambda y: y, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
MODEL_RANKS = [(96, 128, 128, 480), (128, 128, 480), (64, 96, 96, 256), (96, 96, 256), (32, 32, 32, 32)]


def linear(choice: str) -> NativeLinear:
    return NativeLinear(torch.device("cpu"), Tuning("card", "digest", Defaults("sm_90", (Rule(choice),), {})))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float16)


def weight(*shape: int) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).half()


def assert_near(found: Tensor, expected: Tensor, bound: float = 1e-3) -> None:
    assert float((found.double() - expected).norm() / expected.norm()) < bound


def make_low_rank(ranks: tuple[int, ...], rows: int, dtype: torch.dtype) -> LowRank:
    """Padded as a layer's; without v, which comes first, if there are three ranks. What is written holds NaN."""
    rank, n = max(ranks), len(ranks)
    down = torch.stack([F.pad(weight(each, C), (0, 0, 0, rank - each)) for each in ranks]).to(dtype)
    up = torch.stack([F.pad(weight(C, each), (0, rank - each)) for each in ranks]).to(dtype)
    hidden, out = (torch.full((4, rows, width), torch.nan, dtype=dtype)[4 - n :] for width in (rank, C))
    return LowRank(randn(n, rows, C).to(dtype), down, hidden, up, out, ranks, ACTIVATIONS[4 - n :])


def project(by: Linear, low_rank: LowRank) -> None:
    dtype, rows = low_rank.x.dtype, low_rank.x.shape[1]
    by.project(Product(randn(3, rows, C).to(dtype), weight(3, C, C).to(dtype), torch.empty(3, rows, C, dtype=dtype)), low_rank)


CASES = [("rows", 1), ("rows", 8), ("rows", 40), ("cublas", 3), ("cublas", 9), ("cublas", 32), ("cublas", 200)]


@pytest.mark.parametrize(("choice", "rows"), CASES)
def test_projections_agree_with_float64(choice: str, rows: int) -> None:
    x, rkv, rank = randn(6, rows, C), weight(3, C, C), max(RANKS)
    downs, ups = [weight(each, C) for each in RANKS], [weight(C, each) for each in RANKS]
    down = torch.stack([F.pad(each, (0, 0, 0, rank - len(each))) for each in downs])
    up = torch.stack([F.pad(each, (0, rank - each.shape[1])) for each in ups])
    out, hidden, loras = (torch.full((3, rows, n), torch.nan).half() for n in (C, rank, C))
    names: tuple[Activation, ...] = ("tanh", "none", "sigmoid")
    linear(choice).project(Product(x[:3], rkv, out), LowRank(x[3:], down, hidden, up, loras, RANKS, names))
    assert_near(out, x[:3].double() @ rkv.double().mT)
    for i, function in enumerate((torch.tanh, lambda y: y, torch.sigmoid)):
        assert_near(hidden[i, :, : RANKS[i]], function(x[3 + i].double() @ downs[i].double().T))
        assert_near(loras[i], hidden[i, :, : RANKS[i]].double() @ ups[i].double().T)


@pytest.mark.parametrize("rows", [1, 17, 128, 129, 200])
@pytest.mark.parametrize("ranks", [*MODEL_RANKS, (8, 64, 16, 8), (64, 8, 8)], ids=str)
@pytest.mark.parametrize("by", [Linear(), linear("cublas")], ids=["float32", "float16"])
def test_low_rank_products_agree_with_float64_whatever_their_ranks(by: Linear, ranks: tuple[int, ...], rows: int) -> None:
    is_half = isinstance(by, NativeLinear)
    low_rank = make_low_rank(ranks, rows, torch.float16 if is_half else torch.float32)
    project(by, low_rank)
    for x, down, up, out, name in zip(low_rank.x, low_rank.down, low_rank.up, low_rank.out, low_rank.activations, strict=True):
        expected = FUNCTIONS[name](x.double() @ down.double().T) @ up.double().T
        assert_near(out, expected, 1e-3 if is_half else 1e-6)


@pytest.mark.parametrize("ranks", MODEL_RANKS, ids=str)
def test_low_rank_products_of_many_rows_compute_little_padding(ranks: tuple[int, ...]) -> None:
    rows, low_rank = 150, make_low_rank(ranks, 150, torch.float32)
    with FlopCounterMode(display=False) as counter:
        project(Linear(), low_rank)
    main, needed = 2 * 3 * rows * C * C, 2 * 2 * rows * C * sum(ranks)
    assert needed <= counter.get_total_flops() - main < 1.1 * needed


@pytest.mark.parametrize(("rows", "most"), [(100, 2), (150, 4)])
@pytest.mark.parametrize("ranks", MODEL_RANKS, ids=str)
def test_low_rank_products_by_torch_are_few_launches(ranks: tuple[int, ...], rows: int, most: int) -> None:
    low_rank = make_low_rank(ranks, rows, torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        project(Linear(), low_rank)
    assert sum(event.name in ("aten::mm", "aten::bmm") for event in profile.events()) <= 1 + most


@pytest.mark.parametrize(("choice", "rows"), CASES)
def test_channel_mixing_and_logits_agree_with_float64(choice: str, rows: int) -> None:
    x, key, value, head = randn(rows, C), weight(HIDDEN, C), weight(HIDDEN, C), weight(501, C)
    hidden, out, logits = (torch.full((rows, n), torch.nan) for n in (HIDDEN, C, 501))
    hidden, out = hidden.half(), out.half()
    by = linear(choice)
    by.multiply(Product(x, key, hidden, "squared_relu"))
    by.multiply_value(hidden, value, out)
    by.multiply(Product(x, head, logits))
    assert_near(hidden, (CMIX_SCALE * torch.relu(x.double() @ key.double().T)).square())
    assert_near(out, CMIX_SCALE**-2 * hidden.double() @ value.double())
    assert_near(logits, x.double() @ head.double().T)


def test_a_low_rank_product_is_never_left_to_cublas() -> None:
    with pytest.raises(ValueError, match="share a launch"):
        linear("cublas").multiply(Product(randn(2, C), weight(8, C), randn(2, 8), "tanh"))
