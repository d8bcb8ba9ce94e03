"""What surrounds the matrix products, as plain torch has it: against the law in float64, and rounded only where it says so."""

import pytest
import torch
from torch import Tensor

from albatross import reference
from albatross.reference import ops as law

C, HEADS = 192, 3
FP64 = 1e-12
LENGTHS, SLOTS = [3, 1, 0, 2, 4, 0], [2, 0, 3, -1, 4, -1]  # rows of a packed batch; two tokens more belong to no row
NUM_TOKENS = sum(LENGTHS) + 2


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_near(found: Tensor, expected: Tensor, bound: float = FP64) -> None:
    assert found.shape == expected.shape
    assert bool(((found.double() - expected.double()).abs() < bound).all())


class Batch:
    """Arguments of `add_norm_mix`: rows of several lengths, padding rows and tokens past the last row."""

    def __init__(self, dtype: torch.dtype = torch.float64, x_dtype: torch.dtype = torch.float64) -> None:
        ends = torch.tensor([0, *LENGTHS]).cumsum(0)
        self.x = noise(NUM_TOKENS, C, seed=1, dtype=x_dtype)
        self.delta = noise(NUM_TOKENS, C, seed=2, dtype=dtype)
        self.norm = (1 + 0.1 * noise(C, seed=3).float(), noise(C, seed=4).float())
        self.mix = noise(6, C, seed=5, dtype=dtype)
        self.pool = noise(5, 2, C, seed=6, dtype=dtype)
        self.shift = self.pool[:, 1]
        token_rows = torch.bucketize(torch.arange(NUM_TOKENS), ends[1:], right=True)
        self.rows = (ends.int(), token_rows.clamp(max=len(SLOTS) - 1).int(), torch.tensor(SLOTS, dtype=torch.int32))
        self.x_out = torch.full_like(self.x, torch.nan)
        self.mixed = torch.full((6, NUM_TOKENS, C), torch.nan, dtype=dtype)

    def run(self, delta: Tensor | None) -> None:
        reference.add_norm_mix(self.x, delta, *self.norm, self.mix, self.shift, *self.rows, self.x_out, self.mixed)


def test_add_norm_mix_is_the_law_in_every_row() -> None:
    batch = Batch()
    before = batch.pool.clone()
    batch.run(batch.delta)
    y = law.layer_norm(batch.x + batch.delta, *batch.norm)
    assert_near(batch.x_out, batch.x + batch.delta)
    start = 0
    for length, slot in zip([*LENGTHS, 1, 1], [*SLOTS, -1, -1], strict=True):
        end = start + length
        last = before[slot, 1] if slot >= 0 else torch.zeros(C, dtype=torch.float64)
        for mixed, mix in zip(batch.mixed, batch.mix, strict=True):
            assert_near(mixed[start:end], law.tokenshift(y[start:end], last, mix))
        if slot >= 0 and length:
            assert_near(batch.shift[slot], y[end - 1])
            before[slot, 1] = batch.shift[slot]
        start = end
    assert torch.equal(batch.pool, before)


def test_add_norm_mix_of_one_token_a_row_is_the_law() -> None:
    batch = Batch()
    before = batch.shift.clone()
    slots = torch.randperm(5, generator=torch.Generator().manual_seed(1)).int()
    rows = (torch.arange(6, dtype=torch.int32), torch.arange(5, dtype=torch.int32), slots)
    x_out, mixed = batch.x_out[:5], torch.empty(1, 5, C, dtype=torch.float64)
    reference.add_norm_mix(batch.x[:5], None, *batch.norm, batch.mix[:1], batch.shift, *rows, x_out, mixed)
    y = law.layer_norm(batch.x[:5], *batch.norm)
    assert torch.equal(x_out, batch.x[:5])
    assert_near(mixed[0], y + (before[slots.long()] - y) * batch.mix[0])
    assert_near(batch.shift[slots.long()], y)


def test_add_norm_mix_in_float16_rounds_the_norm_and_the_mixes_and_nothing_else() -> None:
    batch = Batch(torch.float16, torch.float32)
    last = batch.shift[2].clone()
    batch.mix[0] = 0
    batch.run(batch.delta)
    assert torch.equal(batch.x_out, batch.x + batch.delta.float())
    y = batch.mixed[0, :3]  # of the first row
    assert_near(y, law.layer_norm(batch.x_out[:3].double(), *batch.norm), 4e-3)
    assert torch.equal(batch.shift[2], y[2])
    for mixed, mix in zip(batch.mixed, batch.mix.double(), strict=True):
        expected = law.tokenshift(y.double(), last.double(), mix).half()
        assert (mixed[:3] != expected).double().mean() < 0.01  # a sum in float32 may fall on the other side of a tie


def test_add_norm_takes_tokens_in_any_order() -> None:
    batch, index = Batch(), torch.tensor([4, 0, 4])
    out = torch.empty(3, C, dtype=torch.float64)
    reference.add_norm(batch.x, batch.delta, *batch.norm, index, out)
    assert_near(out, law.layer_norm((batch.x + batch.delta)[index], *batch.norm))
    reference.add_norm(batch.x, None, *batch.norm, index, out)
    assert_near(out, law.layer_norm(batch.x[index], *batch.norm))
    reference.add_norm(batch.x, batch.delta, *batch.norm, index[:0], out[:0])


class Products:
    """Arguments of the tmix ops for T tokens; the products' rows lie apart."""

    def __init__(self, num_tokens: int, dtype: torch.dtype = torch.float64, is_gated: bool = True) -> None:
        names = ("r", "k", "v", "w", "a", "g", "v_gate", "v_first")
        wide = noise(num_tokens, len(names) * C, seed=num_tokens, dtype=dtype)
        columns = dict(zip(names, wide.split(C, dim=1), strict=True))
        self.r, self.k, self.v, self.w, self.a, self.g = (columns[name] for name in names[:6])
        self.v_gate, self.v_first = (columns["v_gate"], columns["v_first"]) if is_gated else (None, None)
        w0, a0, v0, k_k, k_a, weight, bias = noise(7, C, seed=2).float()
        self.constants = (w0, a0, v0 if is_gated else None, k_k, k_a)
        self.readout = (noise(HEADS, 64, seed=3).float(), weight, bias)

    @property
    def values(self) -> tuple[Tensor | None, ...]:
        return self.k, self.v, self.w, self.a, self.v_gate, self.v_first

    def decode(self, state: Tensor, slots: list[int]) -> Tensor:
        out = torch.full(self.r.shape, torch.nan, dtype=self.r.dtype)
        inputs = (self.r, self.k, self.v, self.w, self.a, self.v_gate, self.g, self.v_first)
        reference.tmix_decode(state, *inputs, *self.constants, *self.readout, torch.tensor(slots, dtype=torch.int32), out)
        return out

    def prefill(self, state: Tensor, bounds: list[int], slots: list[int]) -> Tensor:
        prepared = torch.full((5, *self.r.shape), torch.nan, dtype=self.r.dtype)
        y, out = torch.empty(2, *self.r.shape, dtype=self.r.dtype)
        rows = (torch.tensor(bounds, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32))
        reference.tmix_prepare(*self.values, *self.constants, *prepared)
        heads = [x.reshape(len(x), HEADS, 64) for x in (self.r, *prepared)]
        reference.wkv7_prefill(state, *heads, *rows, y.view(heads[0].shape))
        reference.tmix_readout(y, self.r, prepared[1], prepared[2], self.g, *self.readout, out)
        return out

    def expected(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The law: output [T, C] of the tokens as one sequence from state [H, N, N], and the state after it."""
        (w0, a0, v0, k_k, k_a), (r_k, weight, bias) = self.constants, self.readout
        v, gate = self.v, torch.sigmoid(self.a + a0)
        if self.v_gate is not None and self.v_first is not None and v0 is not None:
            v = v + (self.v_first - v) * torch.sigmoid(self.v_gate + v0)
        heads = (len(v), HEADS, 64)
        kk = law.normalise_heads((self.k * k_k).view(heads))
        k = self.k * (1 + (gate - 1) * k_a)
        r, d, k, v, gate = (x.reshape(heads) for x in (self.r, law.decay(self.w + w0), k, v, gate))
        y, state = law.wkv7(state, r, d, k, v, -kk, kk * gate)
        return (law.group_norm(y, weight, bias) + law.bonus(r, k, v, r_k)) * self.g, state

    def only(self, row: int) -> "Products":
        one = Products.__new__(Products)
        one.__dict__ = {
            name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in self.__dict__.items()
        }
        return one


@pytest.mark.parametrize("is_gated", [True, False])
def test_tmix_decode_is_the_law_in_every_row(is_gated: bool) -> None:
    products, pool = Products(3, is_gated=is_gated), noise(5, 2, HEADS, 64, 64)
    before = pool.clone()
    out = products.decode(pool[:, 1], [4, 0, 2])
    for row, slot in enumerate([4, 0, 2]):
        expected, state = products.only(row).expected(before[slot, 1])
        assert_near(out[row], expected[0])
        assert_near(pool[slot, 1], state)
        before[slot, 1] = pool[slot, 1]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("is_gated", [True, False])
def test_prepare_prefill_and_readout_are_the_law(is_gated: bool) -> None:
    products, state = Products(5, is_gated=is_gated), noise(1, HEADS, 64, 64)
    expected, after = products.expected(state[0])
    assert_near(products.prefill(state, [0, 5], [0]), expected)
    assert_near(state[0], after)


def test_padding_rows_of_tmix_decode_give_zeros_and_touch_no_state() -> None:
    products, state = Products(4), noise(3, HEADS, 64, 64)
    alone = state.clone()
    expected = products.only(2).decode(alone, [1])
    for x in (products.r, products.w, products.v_gate):
        assert x is not None
        x[[0, 1, 3]] = torch.nan
    out = products.decode(state, [-1, -5, 1, -1])
    assert not out[[0, 1, 3]].any()
    assert_near(out[2], expected[0])
    assert_near(state, alone)


def test_tmix_decode_of_padding_alone_gives_zeros() -> None:
    assert not Products(2).decode(noise(1, HEADS, 64, 64), [-1, -1]).any()


def test_the_tmix_ops_in_float16_round_their_outputs_alone() -> None:
    halves, floats = Products(3, torch.float16), Products(3, torch.float32)
    for name in ("r", "k", "v", "w", "a", "g", "v_gate", "v_first"):
        setattr(floats, name, getattr(halves, name).float())
    states = noise(2, 3, HEADS, 64, 64, dtype=torch.float32)
    states[1] = states[0]
    assert torch.equal(halves.decode(states[0], [0, 1, 2]), floats.decode(states[1], [0, 1, 2]).half())
    assert torch.equal(states[0], states[1])
    prepared = [torch.empty(5, 3, C, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    for products, outs in zip((halves, floats), prepared, strict=True):
        reference.tmix_prepare(*products.values, *products.constants, *outs)
    assert torch.equal(prepared[0], prepared[1].half())


def test_tmix_decode_rounds_a_float16_state_once() -> None:
    products = Products(2, torch.float32)
    halves = noise(2, HEADS, 64, 64, dtype=torch.float16)
    floats = halves.float()
    assert torch.equal(products.decode(halves, [1, 0]), products.decode(floats, [1, 0]))
    assert torch.equal(halves, floats.half())
