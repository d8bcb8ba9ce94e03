"""The engine on a CUDA card in float16: the demo model's answers at several concurrencies, repeats, and what it leaves behind."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from albatross import LLM, SamplingParams
from albatross.engine.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.timeout(600),
]
DATA = Path(__file__).parent.parent / "data"
GREEDY = SamplingParams(temperature=0, max_tokens=400)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "eval-11.jsonl").read_text().splitlines()]


@pytest.fixture(params=["float16", "float32"])
def state_dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    torch.cuda.empty_cache()


@pytest.mark.parametrize("concurrency", [1, 64, 256])
def test_every_answer_equals_the_reference(rows: list[dict[str, Any]], concurrency: int, state_dtype: str) -> None:
    llm = LLM(max_num_seqs=concurrency, state_dtype=state_dtype, device="cuda")
    runner = llm._core.runner
    assert isinstance(runner, ModelRunner)
    assert (runner.model.backend, runner.model.dtype) == ("native", torch.float16)
    asked = rows if concurrency > 1 else rows[::4]
    outputs = llm.generate([row["prompt"] for row in asked], GREEDY, stop=["\n\n"], progress=False)
    texts = [output.choices[0].text.removeprefix(" ") for output in outputs]
    wrong = [(row["prompt"], row["reference"], text) for row, text in zip(asked, texts, strict=True) if text != row["reference"]]
    assert not wrong[:3]


def test_a_seeded_story_is_the_same_alone_and_among_others() -> None:
    llm = LLM(max_num_seqs=32, device="cuda")
    story = "User: Tell me a story about a fox.\n\nAssistant:"
    params = SamplingParams(seed=7, max_tokens=80, top_p=0.9, presence_penalty=0.3)
    alone = llm.generate(story, params, progress=False)[0].choices[0].token_ids
    again = llm.generate(story, params, progress=False)[0].choices[0].token_ids
    assert alone == again
    crowd = llm.generate([story] * 8, params, progress=False)
    assert len({tuple(output.choices[0].token_ids) for output in crowd}) == 1


def test_the_same_batch_twice_is_bitwise_equal(rows: list[dict[str, Any]]) -> None:
    llm = LLM(max_num_seqs=64, device="cuda")
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=5)
    prompts = [row["prompt"] for row in rows[:64]]
    first, second = (llm.generate(prompts, params, progress=False) for _ in range(2))
    assert [o.choices[0].logprobs for o in first] == [o.choices[0].logprobs for o in second]


def test_replayed_steps_agree_with_launched_ones(rows: list[dict[str, Any]]) -> None:
    """Batches of 1, 3 and 40 rows: a graph of the same size, a padded one, and one that shrinks as requests end."""
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0)
    launched, replayed = (LLM(max_num_seqs=48, device="cuda", cuda_graphs=is_on) for is_on in (False, True))
    for number in (1, 3, 40):
        prompts = [row["prompt"] for row in rows[:number]]
        plain, graphed = (llm.generate(prompts, params, stop=["\n\n"], progress=False) for llm in (launched, replayed))
        for a, b in zip(plain, graphed, strict=True):
            assert a.choices[0].token_ids == b.choices[0].token_ids
            for x, y in zip(a.choices[0].logprobs or [], b.choices[0].logprobs or [], strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=0.02)


def test_padding_of_a_replayed_step_touches_no_slot() -> None:
    llm = LLM(max_num_seqs=8, device="cuda")
    runner = llm._core.runner
    assert isinstance(runner, ModelRunner)
    assert runner.graphs is not None
    with torch.inference_mode():
        runner.pool.wkv.normal_()
        runner.pool.shift.normal_()
        before = runner.pool.wkv.clone(), runner.pool.shift.clone()
        runner.graphs.run(torch.tensor([5, 6, 7]), torch.tensor([4, 0, 6], dtype=torch.int32))
    others = [1, 2, 3, 5, 7]
    assert torch.equal(runner.pool.wkv[others], before[0][others])
    assert torch.equal(runner.pool.shift[others], before[1][others])
    assert not torch.equal(runner.pool.wkv[4], before[0][4])


def test_forked_choices_equal_separate_requests() -> None:
    llm = LLM(max_num_seqs=8, device="cuda")
    prompt = "User: Name the planets of the solar system.\n\nAssistant:"
    forked = llm.generate(prompt, GREEDY, stop=["\n\n"], n=4, progress=False)[0]
    assert len({choice.text for choice in forked.choices}) == 1
    assert "Neptune" in forked.choices[0].text
