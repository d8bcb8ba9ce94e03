"""The forward pass against the plain float64 reference, on a tiny random model of awkward sizes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from albatross.constants import CMIX_BOUND
from albatross.errors import ConfigError
from albatross.models import layout, memory
from albatross.models.linear import Linear
from albatross.models.rwkv7 import RWKV7
from albatross.models.state_pool import StatePool
from albatross.reference import rwkv7 as reference
from albatross.reference import squared_relu
from model.batches import error, run

FP32 = 3e-6  # measured: 5e-7
FP16 = 4e-3  # measured: 9e-4

Weights = dict[str, torch.Tensor]


@pytest.fixture
def pool(tiny: RWKV7) -> StatePool:
    """Five slots full of noise, which a test must never find in its results."""
    pool = tiny.new_state_pool(5)
    generator = torch.Generator().manual_seed(7)
    pool.wkv.normal_(generator=generator)
    pool.shift.normal_(generator=generator)
    return pool


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expect(weights: Weights, ids: list[int]) -> tuple[torch.Tensor, reference.State]:
    doubles = {name: tensor.double() for name, tensor in weights.items()}
    return reference.forward(doubles, torch.tensor(ids), reference.zero_state(doubles))


def assert_state(pool: StatePool, slot: int, state: reference.State, bound: float) -> None:
    wkv, shift = pool.read(slot)
    assert error(wkv, state.wkv) < bound
    assert error(shift, state.shift) < bound


def test_logits_of_every_token_and_the_final_state_equal_the_reference(
    tiny: RWKV7, tiny_weights: Weights, pool: StatePool
) -> None:
    ids = prompt(41)
    logits, state = expect(tiny_weights, ids)
    pool.zero([2])
    assert error(run(tiny, pool, [(2, ids)]), logits) < FP32
    assert_state(pool, 2, state, FP32)


def test_float16_stays_near_the_reference(load: Callable[..., RWKV7], tiny_path: Path, tiny_weights: Weights) -> None:
    model = load(tiny_path, dtype="float16")
    pool = model.new_state_pool(1)
    ids = prompt(41)
    logits, state = expect(tiny_weights, ids)
    found = run(model, pool, [(0, ids)])
    assert found.dtype == torch.float32
    assert error(found, logits) < FP16
    assert_state(pool, 0, state, FP16)


def test_a_float16_state_stays_near_the_reference(load: Callable[..., RWKV7], tiny_path: Path, tiny_weights: Weights) -> None:
    model = load(tiny_path, state_dtype="float16")
    pool = model.new_state_pool(1)
    ids = prompt(41)
    logits, state = expect(tiny_weights, ids)
    found = torch.cat([run(model, pool, [(0, [token])], is_decode=True) for token in ids])
    assert pool.wkv.dtype == torch.float16
    assert error(found, logits) < FP16
    assert_state(pool, 0, state, FP16)


@pytest.mark.parametrize("cuts", [[1], [40], [7, 8, 30], list(range(1, 41))])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(
    tiny: RWKV7, tiny_weights: Weights, pool: StatePool, cuts: list[int]
) -> None:
    ids = prompt(41)
    logits, state = expect(tiny_weights, ids)
    pool.zero([4])
    chunks = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, 41], strict=True)]
    assert error(torch.cat([run(tiny, pool, [(4, chunk)]) for chunk in chunks]), logits) < FP32
    assert_state(pool, 4, state, FP32)


def test_tokens_fed_one_by_one_give_what_the_whole_prompt_gives(tiny: RWKV7, tiny_weights: Weights, pool: StatePool) -> None:
    ids = prompt(41)
    logits, state = expect(tiny_weights, ids)
    pool.zero([0])
    assert error(torch.cat([run(tiny, pool, [(0, [token])], is_decode=True) for token in ids]), logits) < FP32
    assert_state(pool, 0, state, FP32)


def test_packed_rows_do_not_see_each_other(tiny: RWKV7, tiny_weights: Weights, pool: StatePool) -> None:
    rows = [(3, prompt(17, 1)), (0, prompt(1, 2)), (4, prompt(30, 3)), (1, prompt(2, 4))]
    pool.zero([slot for slot, _ in rows])
    logits = run(tiny, pool, rows)
    for (slot, ids), found in zip(rows, logits.split([17, 1, 30, 2]), strict=True):
        expected, state = expect(tiny_weights, ids)
        assert error(found, expected) < FP32
        assert_state(pool, slot, state, FP32)


def test_a_decode_step_of_many_rows_gives_what_each_row_gives_alone(tiny: RWKV7, tiny_weights: Weights, pool: StatePool) -> None:
    rows = [(4, prompt(9, 1)), (2, prompt(9, 2)), (0, prompt(9, 3))]
    pool.zero([slot for slot, _ in rows])
    steps = [run(tiny, pool, [(slot, ids[t : t + 1]) for slot, ids in rows], is_decode=True) for t in range(9)]
    for row, (slot, ids) in enumerate(rows):
        expected, state = expect(tiny_weights, ids)
        assert error(torch.stack([logits[row] for logits in steps]), expected) < FP32
        assert_state(pool, slot, state, FP32)


def test_slots_outside_the_batch_are_left_alone(tiny: RWKV7, pool: StatePool) -> None:
    before = pool.wkv.clone(), pool.shift.clone()
    run(tiny, pool, [(1, prompt(5)), (3, prompt(2))])
    run(tiny, pool, [(3, [5]), (1, [6])], is_decode=True)
    for slot in (0, 2, 4):
        assert torch.equal(pool.wkv[slot], before[0][slot])
        assert torch.equal(pool.shift[slot], before[1][slot])


@pytest.mark.parametrize(
    "padding", [[(-1, [8]), (-7, [9, 9])], [(2, [])], [(-1, [])]], ids=["negative slots", "an empty row", "an empty padding row"]
)
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_padding_in_a_packed_batch_leaves_no_trace(
    tiny: RWKV7, pool: StatePool, padding: list[tuple[int, list[int]]], place: str
) -> None:
    rows = [(0, prompt(6, 1)), (4, prompt(3, 2))]
    state = pool.wkv.clone(), pool.shift.clone()
    plain = run(tiny, pool, rows)
    after = pool.wkv.clone(), pool.shift.clone()
    pool.wkv.copy_(state[0])
    pool.shift.copy_(state[1])
    cut = {"before": 0, "between": 1, "after": 2}[place]
    padded = rows[:cut] + padding + rows[cut:]
    start = sum(len(ids) for _, ids in rows[:cut])
    num_padding = sum(len(ids) for _, ids in padding)
    wanted = [*range(start), *range(start + num_padding, 9 + num_padding)]
    assert error(run(tiny, pool, padded, wanted), plain) < FP32
    assert error(pool.wkv, after[0]) < FP32
    assert error(pool.shift, after[1]) < FP32


def test_tokens_past_the_last_row_leave_no_trace(tiny: RWKV7, pool: StatePool) -> None:
    ids = prompt(6)
    pool.zero([1, 2])
    plain = run(tiny, pool, [(1, ids)])
    bounds, slots = torch.tensor([0, 6, 6], dtype=torch.int32), torch.tensor([2, -1], dtype=torch.int32)
    padded = tiny.forward(torch.tensor([*ids, 0, 0]), bounds, slots, torch.arange(6), pool, is_decode=False)
    assert error(padded, plain) < FP32
    assert error(pool.wkv[2], pool.wkv[1]) < FP32
    assert error(pool.shift[2], pool.shift[1]) < FP32


def test_hidden_states_that_are_kept_give_the_same_logits_later(tiny: RWKV7, pool: StatePool) -> None:
    ids = torch.tensor(prompt(6))
    pool.zero([1, 2])
    plain = run(tiny, pool, [(1, ids.tolist())])
    bounds, slots, normed = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), tiny.new_normed(6)
    index = torch.tensor([5, 0, 5])
    chosen = tiny.forward(ids, bounds, slots, index, pool, is_decode=False, normed=normed)
    later = torch.empty(4, tiny.config.vocab_size)
    tiny.project(normed[1:5], later)
    assert error(chosen, plain[index]) < FP32
    assert error(later, plain[1:5]) < FP32


def test_padding_in_a_decode_step_leaves_no_trace(tiny: RWKV7, pool: StatePool) -> None:
    pool.zero([0, 1])
    before = pool.wkv.clone(), pool.shift.clone()
    plain = run(tiny, pool, [(0, [11])], is_decode=True)
    padded = run(tiny, pool, [(-1, [3]), (1, [11]), (-1, [4])], [1], is_decode=True)
    assert error(padded, plain) < FP32
    assert error(pool.wkv[1], pool.wkv[0]) < FP32
    assert torch.equal(pool.wkv[2:], before[0][2:])
    assert torch.equal(pool.shift[2:], before[1][2:])


def test_padding_reads_no_slot(tiny: RWKV7, pool: StatePool) -> None:
    pool.zero([0])
    pool.wkv[1:], pool.shift[1:] = torch.nan, torch.nan
    assert run(tiny, pool, [(-1, [3, 4]), (0, [11, 12])]).isfinite().all()
    assert run(tiny, pool, [(-1, [3]), (0, [13])], is_decode=True).isfinite().all()


def test_logits_come_for_the_tokens_asked_for_in_their_order(tiny: RWKV7, pool: StatePool) -> None:
    ids = prompt(5)
    pool.zero([0, 1, 2])
    every = run(tiny, pool, [(0, ids)])
    assert error(run(tiny, pool, [(1, ids)], [4, 0, 4]), every[[4, 0, 4]]) < FP32
    assert run(tiny, pool, [(2, ids)], []).shape == (0, 97)
    assert error(pool.wkv[2], pool.wkv[0]) < FP32


def test_the_unused_tensors_of_layer_0_may_be_absent(
    load: Callable[..., RWKV7], tiny: RWKV7, tiny_weights: Weights, tmp_path: Path
) -> None:
    path = tmp_path / "model.pth"
    torch.save({name: tensor for name, tensor in tiny_weights.items() if not layout.is_optional(name)}, path)
    ids = prompt(5)
    assert torch.equal(run(load(path), tiny.new_state_pool(1), [(0, ids)]), run(tiny, tiny.new_state_pool(1), [(0, ids)]))


def test_the_native_ops_on_the_cpu_are_the_reference(load: Callable[..., RWKV7], tiny: RWKV7, tiny_path: Path) -> None:
    ids = prompt(5)
    found = run(load(tiny_path, backend="native"), tiny.new_state_pool(1), [(0, ids)])
    assert torch.equal(found, run(tiny, tiny.new_state_pool(1), [(0, ids)]))


def test_embeddings_too_small_for_float16_keep_their_direction(
    load: Callable[..., RWKV7], tiny_weights: Weights, tmp_path: Path
) -> None:
    weights = tiny_weights | {"emb.weight": tiny_weights["emb.weight"] * 1e-3}
    path = tmp_path / "model.pth"
    torch.save({name: tensor.bfloat16() for name, tensor in weights.items()}, path)
    model = load(path, dtype="float16")
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    logits, _ = expect(rounded, prompt(5))
    assert error(run(model, model.new_state_pool(1), [(0, prompt(5))]), logits) < FP16


@pytest.mark.parametrize("peak", [0.25, 1.0, 255.0, 300.0, CMIX_BOUND])
def test_the_channel_mix_in_float16_equals_float64_up_to_its_bound(peak: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.rand(4, 320, generator=generator) * 2 - 1).half() * min(peak, 8)
    hidden[0, 0] = peak
    value = (torch.randn(320, 192, generator=generator) / 16).half()
    expected = torch.relu(hidden.double()).square() @ value.double()
    found = torch.full((4, 192), torch.nan).half()
    squared_relu(hidden)
    Linear().multiply_value(hidden, value, found)
    is_in_range = expected.abs() < 65504  # the output itself is in float16
    assert found[is_in_range].isfinite().all()
    assert error(found[is_in_range], expected[is_in_range]) < 2e-3


def test_a_model_larger_than_free_memory_is_refused_with_both_numbers(
    load: Callable[..., RWKV7], tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 2**20)
    with pytest.raises(ConfigError, match=r"tiny\.pth needs 0\.00 GiB of memory on cpu, where 0\.00 GiB are free"):
        load(tiny_path)


def test_a_pool_larger_than_free_memory_is_refused_with_both_numbers(tiny: RWKV7, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 2**30)
    with pytest.raises(ConfigError, match=r"A pool of 100000 states needs 9\.44 GiB .* 1\.00 GiB are free: lower max_num_seqs"):
        tiny.new_state_pool(100_000)
