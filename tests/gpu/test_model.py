"""The model on a CUDA card with the native library: goldens, padding, no waiting for the device, capture in a graph."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model.batches import error, run

from albatross.errors import ConfigError
from albatross.models import memory
from albatross.models.rwkv7 import RWKV7, load_model
from albatross.models.state_pool import StatePool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

FP32 = 1e-5
FP16_LOGITS, FP16_STATES = 3e-3, 8e-3

Golden = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["float16", "float32"])
def state_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(demo_path: Path, state_dtype: str) -> RWKV7:
    return load_model(demo_path, device="cuda", dtype="float16", state_dtype=state_dtype, backend="native")


@pytest.fixture(scope="module")
def model_fp32(demo_path: Path) -> RWKV7:
    return load_model(demo_path, device="cuda", dtype="float32", state_dtype="float32", backend="native")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Any wait of the host for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def assert_golden(logits: torch.Tensor, pool: StatePool, slot: int, golden: Golden, bounds: tuple[float, float]) -> None:
    wkv, shift = pool.read(slot)
    assert error(logits, golden["logits"]) < bounds[0]
    for part in (0, 1):
        assert error(shift[:, part], golden["shift"][:, part]) < bounds[1]
    if "wkv" in golden:
        assert error(wkv, golden["wkv"]) < bounds[1]


@pytest.mark.parametrize("index", range(8))
def test_float16_gives_the_goldens_nearly(model: RWKV7, goldens: list[Golden], index: int) -> None:
    pool, ids = model.new_state_pool(2), goldens[index]["ids"].tolist()
    logits = run(model, pool, [(1, ids)], [len(ids) - 1])
    assert_golden(logits[0], pool, 1, goldens[index], (FP16_LOGITS, FP16_STATES))


@pytest.mark.parametrize("index", range(8))
def test_float32_gives_the_goldens(model_fp32: RWKV7, goldens: list[Golden], index: int) -> None:
    pool, ids = model_fp32.new_state_pool(2), goldens[index]["ids"].tolist()
    logits = run(model_fp32, pool, [(1, ids)], [len(ids) - 1])
    assert_golden(logits[0], pool, 1, goldens[index], (FP32, FP32))


def test_prompts_fed_one_token_a_step_give_the_goldens_nearly(model: RWKV7, goldens: list[Golden]) -> None:
    pool, last = model.new_state_pool(8), {}
    lengths = [len(golden["ids"]) for golden in goldens]
    for step in range(max(lengths)):
        rows = [
            (slot if step < lengths[slot] else -1, [int(golden["ids"][min(step, lengths[slot] - 1)])])
            for slot, golden in enumerate(goldens)
        ]
        logits = run(model, pool, rows, is_decode=True)
        last |= {slot: logits[slot] for slot, _ in rows if slot >= 0}
    for slot, golden in enumerate(goldens):
        assert_golden(last[slot], pool, slot, golden, (FP16_LOGITS, FP16_STATES))


def test_all_prompts_packed_in_chunks_give_the_goldens_nearly(model: RWKV7, goldens: list[Golden]) -> None:
    pool, last = model.new_state_pool(8), {}
    for quarter in range(4):
        rows = [
            (slot, golden["ids"].tolist()[len(golden["ids"]) * quarter // 4 : len(golden["ids"]) * (quarter + 1) // 4])
            for slot, golden in enumerate(goldens)
        ]
        logits = run(model, pool, rows)
        for (slot, ids), found in zip(rows, logits.split([len(ids) for _, ids in rows]), strict=True):
            last |= {slot: found[-1]} if ids else {}
    for slot, golden in enumerate(goldens):
        assert_golden(last[slot], pool, slot, golden, (FP16_LOGITS, FP16_STATES))


@pytest.mark.parametrize("is_decode", [True, False])
def test_padding_leaves_no_trace(model: RWKV7, is_decode: bool) -> None:
    pool = model.new_state_pool(4)
    run(model, pool, [(slot, [slot + 1, 7]) for slot in range(4)])
    pool.copy(0, [1])
    before = pool.wkv.clone(), pool.shift.clone()
    plain = run(model, pool, [(0, [9])], is_decode=is_decode)
    padded = run(model, pool, [(-1, [3]), (1, [9]), (-1, [4])], [1], is_decode=is_decode)
    assert error(padded, plain) < FP16_LOGITS
    assert error(pool.wkv[1], pool.wkv[0]) < FP16_STATES
    assert torch.equal(pool.wkv[2:], before[0][2:])
    assert torch.equal(pool.shift[2:], before[1][2:])


def inputs(rows: int, tokens_per_row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens = rows * tokens_per_row
    return (
        torch.arange(1, num_tokens + 1, device="cuda"),
        torch.arange(0, num_tokens + 1, tokens_per_row, device="cuda", dtype=torch.int32),
        torch.arange(rows, device="cuda", dtype=torch.int32),
        torch.arange(tokens_per_row - 1, num_tokens, tokens_per_row, device="cuda"),
    )


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("tokens_per_row", [1, 5])
def test_the_host_never_waits_for_the_device(model: RWKV7, tokens_per_row: int) -> None:
    pool, batch = model.new_state_pool(3), inputs(3, tokens_per_row)
    logits = model.forward(*batch, pool, is_decode=tokens_per_row == 1)
    torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().all()


@pytest.mark.parametrize("tokens_per_row", [1, 5])
def test_a_captured_step_replays_with_other_tokens_slots_and_padding(model: RWKV7, tokens_per_row: int) -> None:
    pool, eager = model.new_state_pool(4), model.new_state_pool(4)
    batch, is_decode = inputs(3, tokens_per_row), tokens_per_row == 1
    model.forward(*batch, pool, is_decode=is_decode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.forward(*batch, pool, is_decode=is_decode)
    pool.zero(range(4))
    batch[0].copy_(batch[0].flip(0))
    batch[2].copy_(torch.tensor([3, -1, 1]))
    graph.replay()
    expected = model.forward(*batch, eager, is_decode=is_decode)
    assert error(logits[[0, 2]], expected[[0, 2]]) < FP16_LOGITS
    assert error(pool.wkv, eager.wkv) < FP16_STATES
    assert error(pool.shift, eager.shift) < FP16_STATES


def test_a_model_larger_than_free_memory_is_refused_and_leaves_the_card_as_it_was(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.zeros(1, device="cuda")
    before, _ = torch.cuda.mem_get_info()
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 8 * 2**20)
    with pytest.raises(ConfigError, match=r"gosling\.pth needs 0\.02 GiB of memory on cuda:0, where 0\.01 GiB are free"):
        load_model(demo_path, device="cuda", dtype="float16", state_dtype="float16", backend="native")
    after, _ = torch.cuda.mem_get_info()
    assert before - after < 100 * 2**20
