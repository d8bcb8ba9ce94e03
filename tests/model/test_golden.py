"""The demo model against float64 goldens, however its prompts are fed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from albatross.models.rwkv7 import RWKV7
from albatross.reference import rwkv7 as reference
from model.batches import error, run

FP32 = 2e-6  # measured: 6e-7 at most
FP16_LOGITS, FP16_STATES = 3e-3, 8e-3  # measured: 9e-4 and 7e-4 at most

Golden = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(load: Callable[..., RWKV7], demo_path: Path) -> RWKV7:
    return load(demo_path)


def assert_golden(
    found: torch.Tensor, wkv: torch.Tensor, shift: torch.Tensor, golden: Golden, logits: float, states: float
) -> None:
    assert error(found, golden["logits"]) < logits
    for part in (0, 1):
        assert error(shift[:, part], golden["shift"][:, part]) < states
    if "wkv" in golden:
        assert error(wkv, golden["wkv"]) < states


@pytest.mark.parametrize("index", range(8))
def test_float32_gives_the_goldens(model: RWKV7, goldens: list[Golden], index: int) -> None:
    golden, pool = goldens[index], model.new_state_pool(1)
    ids = golden["ids"].tolist()
    logits = run(model, pool, [(0, ids)], [len(ids) - 1])
    assert_golden(logits[0], *pool.read(0), golden, FP32, FP32)


@pytest.mark.parametrize("index", range(8))
def test_float16_gives_the_goldens_nearly(load: Callable[..., RWKV7], demo_path: Path, goldens: list[Golden], index: int) -> None:
    model, golden = load(demo_path, dtype="float16", state_dtype="float16"), goldens[index]
    pool, ids = model.new_state_pool(1), golden["ids"].tolist()
    logits = run(model, pool, [(0, ids)], [len(ids) - 1])
    assert_golden(logits[0], *pool.read(0), golden, FP16_LOGITS, FP16_STATES)


def test_all_prompts_packed_in_chunks_give_the_goldens(model: RWKV7, goldens: list[Golden]) -> None:
    """Four batches, each with the next quarter of every prompt: rows of no token, of one, and of 196 side by side."""
    pool = model.new_state_pool(8)
    last: dict[int, torch.Tensor] = {}
    for quarter in range(4):
        rows, ends = [], [0]
        for slot, golden in enumerate(goldens):
            ids = golden["ids"].tolist()
            rows.append((slot, ids[len(ids) * quarter // 4 : len(ids) * (quarter + 1) // 4]))
            ends.append(ends[-1] + len(rows[-1][1]))
        logits = run(model, pool, rows)
        last |= {slot: logits[ends[slot + 1] - 1] for slot, ids in rows if ids}
    for slot, golden in enumerate(goldens):
        assert_golden(last[slot], *pool.read(slot), golden, FP32, FP32)


def test_prompts_fed_one_token_a_step_give_the_goldens(model: RWKV7, goldens: list[Golden]) -> None:
    """All but the longest prompt decode together; a row whose prompt is over becomes padding."""
    short = [golden for golden in goldens if len(golden["ids"]) < 200]
    pool = model.new_state_pool(len(short))
    last: dict[int, torch.Tensor] = {}
    for step in range(max(len(golden["ids"]) for golden in short)):
        rows = [
            (slot if step < len(g["ids"]) else -1, [int(g["ids"][min(step, len(g["ids"]) - 1)])]) for slot, g in enumerate(short)
        ]
        logits = run(model, pool, rows, is_decode=True)
        last |= {slot: logits[slot] for slot, _ in rows if slot >= 0}
    for slot, golden in enumerate(short):
        assert_golden(last[slot], *pool.read(slot), golden, FP32, FP32)


@pytest.mark.parametrize("index", [0, 1, 2, 6])
def test_the_float64_reference_gives_the_goldens_to_their_last_digit(demo_path: Path, goldens: list[Golden], index: int) -> None:
    weights = {name: tensor.double() for name, tensor in torch.load(demo_path, weights_only=True).items()}
    logits, state = reference.forward(weights, goldens[index]["ids"], reference.zero_state(weights))
    assert_golden(logits[-1], state.wkv, state.shift, goldens[index], 1e-7, 1e-7)  # the goldens are stored in float32
