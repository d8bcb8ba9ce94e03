"""Which kernel computes which product must change nothing but the time: every choice against float64, on the ops' CPU side."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from albatross.constants import CMIX_SCALE
from albatross.models.linear import Activation, LowRank, NativeLinear, Product
from albatross.models.tuning import Defaults, Rule, Tuning

C, HIDDEN, RANKS = 128, 256, (32, 8, 24)


def linear(choice: str) -> NativeLinear:
    return NativeLinear(torch.device("cpu"), Tuning("card", "digest", Defaults("sm_90", (Rule(choice),), {})))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float16)


def weight(*shape: int) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).half()


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-3


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
