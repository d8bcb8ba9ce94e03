"""The state pool: slots are independent, and what is saved comes back."""

import pytest
import torch

from albatross.models.rwkv7 import RWKV7
from albatross.models.state_pool import StatePool

SLOTS = 4


@pytest.fixture
def pool(tiny: RWKV7) -> StatePool:
    """Every slot is filled with its own number."""
    pool = tiny.new_state_pool(SLOTS)
    for slot in range(SLOTS):
        pool.wkv[slot] = slot + 1
        pool.shift[slot] = -slot - 1
    return pool


def contents(pool: StatePool) -> list[tuple[float, float]]:
    """The number each slot is filled with; fails if a slot is not filled with one number."""
    found = []
    for slot in range(SLOTS):
        values = pool.wkv[slot].unique(), pool.shift[slot].unique()
        assert [len(value) for value in values] == [1, 1]
        found.append((values[0].item(), values[1].item()))
    return found


def test_a_fresh_pool_is_zero_and_of_the_model_s_shapes(tiny: RWKV7) -> None:
    pool = tiny.new_state_pool(SLOTS)
    assert pool.wkv.shape == (SLOTS, 2, 3, 64, 64)
    assert pool.shift.shape == (SLOTS, 2, 2, 192)
    assert contents(pool) == [(0, 0)] * SLOTS


def test_zero_clears_only_the_slots_named(pool: StatePool) -> None:
    pool.zero([2, 0])
    assert contents(pool) == [(0, 0), (2, -2), (0, 0), (4, -4)]


def test_copy_fills_every_destination_and_nothing_else(pool: StatePool) -> None:
    pool.copy(1, [3, 0])
    assert contents(pool) == [(2, -2), (2, -2), (3, -3), (2, -2)]


def test_a_saved_state_comes_back_after_the_slot_was_used(pool: StatePool) -> None:
    saved = pool.read(2)
    pool.zero([2])
    pool.write(1, *saved)
    assert contents(pool) == [(1, -1), (3, -3), (0, 0), (4, -4)]


def test_a_state_is_rounded_to_the_pool_s_types_when_written(pool: StatePool) -> None:
    pool.write(0, torch.full((2, 3, 64, 64), 7.0, dtype=torch.float64), torch.full((2, 2, 192), 8.0, dtype=torch.float16))
    assert contents(pool)[0] == (7, 8)


def test_slot_bytes_is_the_memory_of_one_slot(pool: StatePool) -> None:
    wkv, shift = pool.read(0)
    assert pool.slot_bytes == wkv.nbytes + shift.nbytes


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_outside_the_pool_is_refused_and_nothing_changes(pool: StatePool, slot: int) -> None:
    state = pool.read(0)
    for call in (
        lambda: pool.zero([0, slot]), lambda: pool.copy(slot, [0]), lambda: pool.copy(0, [1, slot]),
        lambda: pool.read(slot), lambda: pool.write(slot, *state),
    ):  # fmt: skip
        with pytest.raises(IndexError, match=f"Slot {slot} is outside the pool of 4 slots"):
            call()
    assert contents(pool) == [(1, -1), (2, -2), (3, -3), (4, -4)]


def test_a_state_of_another_model_is_refused_with_both_shapes(pool: StatePool) -> None:
    wkv, shift = pool.read(0)
    with pytest.raises(ValueError, match=r"wkv of a saved state has shape \[1, 3, 64, 64\]; this model's is \[2, 3, 64, 64\]"):
        pool.write(0, wkv[:1], shift)
    with pytest.raises(ValueError, match=r"shift of a saved state"):
        pool.write(0, wkv + 1, shift[:, :1])
    assert contents(pool)[0] == (1, -1)
