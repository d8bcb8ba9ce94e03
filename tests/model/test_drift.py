"""The drift benchmark on a few tokens on the CPU: that its parts measure what they say."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from albatross.models.rwkv7 import RWKV7
from albatross.tokenizer.world import WorldTokenizer
from bench import drift, stepper
from bench.timing import Result
from model.batches import error, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(demo_path: Path, load: Callable[..., RWKV7]) -> dict[str, RWKV7]:
    return {f"{state} state": load(demo_path, state_dtype=state) for state in ("float32", "float16")}


def values(results: list[Result], name: str) -> list[float]:
    (found,) = [result.details["values"] for result in results if result.name == name]
    return list(found)


def test_rows_of_unequal_length_give_what_each_gives_alone(tiny: RWKV7, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "CHUNK", 4)
    rows = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33]]
    reader = stepper.Stepper(tiny, 3, 4)
    steps = [logits.clone() for logits in reader.read(rows, [3, 0, 2])]
    assert len(steps) == 7
    for index, (row, slot) in enumerate(zip(rows, [3, 0, 2], strict=True)):
        alone = tiny.new_state_pool(1)
        expected = run(tiny, alone, [(0, row)])
        assert error(torch.stack([logits[index] for logits in steps[: len(row)]]), expected) < 1e-5
        assert error(reader.pool.read(slot)[0], alone.read(0)[0]) < 1e-5
    assert not reader.pool.read(1)[0].any()


def test_a_float16_state_costs_the_recurrence_more_the_weaker_the_decay() -> None:
    results = drift.recurrence(CPU, 48)
    fp32, strong, weak = (
        values(results, f"recurrence, {name}: state")[-1]
        for name in ("weak decay, fp32 state", "strong decay, fp16 state", "weak decay, fp16 state")
    )
    assert fp32 < 1e-5 < strong < weak < 1e-2
    assert values(results, "recurrence, weak decay, fp16 state: y")[-1] < 1e-2
    assert {tuple(result.details["columns"]) for result in results} == {(12, 24, 36, 48)}


def test_the_text_is_one_text_whatever_its_length() -> None:
    tokenizer = WorldTokenizer(4096)
    long, short = drift.long_text(tokenizer, 30_000), drift.long_text(tokenizer, 100)
    assert (len(long), len(short)) == (30_001, 101)
    assert long[:101] == short
    assert max(long) < 4096


def test_losses_and_errors_of_the_text_are_told_by_quarters(models: dict[str, RWKV7]) -> None:
    results = drift.text(models, 32)
    exact = values(results, "text, float64: loss")
    assert len(exact) == 4
    for name in models:
        assert values(results, f"text, {name}: loss") == pytest.approx(exact, abs=0.01)
    fp32, fp16 = (values(results, f"text, {name} state: state") for name in ("float32", "float16"))
    assert all(a < 1e-5 < b < 1e-2 for a, b in zip(fp32, fp16, strict=True))
    assert max(values(results, "text, float32 state: logits")) < 1e-5


def test_the_demo_model_recalls_what_it_was_just_told(models: dict[str, RWKV7]) -> None:
    results = drift.recall({"float32 state": models["float32 state"]}, (1, 16), 3)
    assert values(results, "recall, float32 state")[0] >= 60
    assert results[0].details["columns"] == [1, 16]


def test_a_dialogue_asks_for_a_number_it_told() -> None:
    tokenizer = WorldTokenizer(4096)
    row = drift.Dialogue(7, tokenizer, drift.load_conversations())
    asked = tokenizer.decode(row.question).removeprefix("User: What is ").partition("?")[0]
    assert f"{asked}={row.answer}" in tokenizer.decode(row.facts)
    assert "Remember" not in tokenizer.decode(row.chatter(2000))
