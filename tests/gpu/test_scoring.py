"""Prompt log-probabilities on a CUDA card in float16: by graphs and without, with neighbours and alone, and what they take."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from albatross import LLM, SamplingParams
from albatross.engine.model_runner import ModelRunner
from albatross.engine.prompt_logprobs import PromptTokenLogprobs
from albatross.engine.scoring import BLOCK_ROWS
from albatross.llm import RequestOutput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.timeout(600),
]
DATA = Path(__file__).parent.parent / "data"
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)
BOTH = SamplingParams(temperature=0, max_tokens=20, logprobs=0, prompt_logprobs=3)
GREEDY = SamplingParams(temperature=0, max_tokens=60)
POISON = 3000  # an id whose embedding a test fills with NaN
ROUNDING = {"abs": 0.05, "rel": 0.01}  # in float16 on the CPU the largest error is a quarter of that


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm._core.runner
    assert isinstance(runner, ModelRunner)
    return runner


def make(**settings: Any) -> LLM:
    return LLM(device="cuda", **{"max_num_seqs": 16, "max_num_batched_tokens": 64, **settings})


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Of 19 to 174 tokens, but the last, which takes several blocks of logits."""
    rows = [json.loads(line) for line in (DATA / "eval-11.jsonl").read_text().splitlines()]
    texts = [row["prompt"] + " " + row["reference"] for row in rows[::16]]
    return [*texts, "\n\n".join(texts)]


@pytest.fixture(scope="module")
def expected(prompts: list[str]) -> list[RequestOutput]:
    """From the CPU in float32."""
    return LLM(device="cpu", max_num_seqs=16).generate(prompts, SCORE, progress=False)


@pytest.fixture(autouse=True)
def _no_memory_kept() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def entries(output: RequestOutput) -> list[PromptTokenLogprobs]:
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    first, *others = output.prompt_logprobs
    assert first is None
    return [entry for entry in others if entry is not None]


def check_near(found: RequestOutput, expected: RequestOutput) -> None:
    for one, other in zip(entries(found), entries(expected), strict=True):
        assert one.logprob == pytest.approx(other.logprob, **ROUNDING)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, **ROUNDING)
        if other.top_logprobs[0] - other.top_logprobs[1] > 0.2:
            assert one.top_ids[0] == other.top_ids[0]
            assert (one.rank == 1) == (other.rank == 1)


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_scores_are_those_of_the_cpu_in_any_chunks(
    prompts: list[str], expected: list[RequestOutput], budget: int, cuda_graphs: bool
) -> None:
    llm = make(max_num_batched_tokens=budget, cuda_graphs=cuda_graphs)
    for found, reference in zip(llm.generate(prompts, SCORE, progress=False), expected, strict=True):
        check_near(found, reference)


def test_graphs_change_neither_scores_nor_draws(prompts: list[str]) -> None:
    launched, replayed = (make(cuda_graphs=is_on).generate(prompts, BOTH, progress=False) for is_on in (False, True))
    for one, other in zip(launched, replayed, strict=True):
        check_near(one, other)
        assert one.choices[0].token_ids == other.choices[0].token_ids


def test_the_same_batch_twice_is_bitwise_equal(prompts: list[str]) -> None:
    llm = make(prefill_pace=0)  # otherwise times decide what a step reads
    first, second = (llm.generate(prompts, BOTH, progress=False) for _ in range(2))
    assert [output.prompt_logprobs for output in first] == [output.prompt_logprobs for output in second]


def test_neighbours_change_no_score_and_scores_no_neighbour(prompts: list[str], expected: list[RequestOutput]) -> None:
    """Scored prompts arrive while others decode, and among prompts that are not scored."""
    llm = make()
    params = [SCORE if number % 3 == 0 else GREEDY for number in range(len(prompts))]
    found = llm.generate(prompts, params, progress=False)
    plain = llm.generate(prompts, GREEDY, progress=False)
    for number, (output, reference) in enumerate(zip(found, expected, strict=True)):
        if number % 3 == 0:
            check_near(output, reference)
        else:
            assert output.prompt_logprobs is None
            assert output.choices[0].token_ids == plain[number].choices[0].token_ids


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_scores_that_are_not_finite_end_their_request_alone(prompts: list[str], cuda_graphs: bool) -> None:
    llm = make(cuda_graphs=cuda_graphs)
    before = llm.generate(prompts[:8], BOTH, progress=False)
    bad = llm.encode(prompts[3])
    bad[len(bad) // 2] = POISON
    row = runner_of(llm).model._embedding[POISON]
    kept = row.clone()
    with torch.inference_mode():
        row.fill_(torch.nan)
        found = llm.generate([*prompts[:3], bad, *prompts[4:8]], BOTH, progress=False)
        row.copy_(kept)
    assert found[3].choices[0].finish_reason == "error"
    assert found[3].prompt_logprobs is None
    for number in (0, 1, 2, 4, 5, 6, 7):
        check_near(found[number], before[number])
        assert found[number].choices[0].token_ids == before[number].choices[0].token_ids
    assert llm.generate(prompts[:8], BOTH, progress=False)[3].choices[0].finish_reason != "error"


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_nothing_waits_for_the_device_when_a_scored_step_is_launched(
    prompts: list[str], cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(cuda_graphs=cuda_graphs)
    llm.generate(prompts, BOTH, progress=False)  # whatever is made at the first use is there
    runner = runner_of(llm)
    launch = runner.launch

    def strict(step: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(runner, "launch", strict)
    assert all(entries(output) for output in llm.generate(prompts, BOTH, progress=False))


def test_scoring_a_long_prompt_takes_the_memory_of_a_block() -> None:
    num_tokens = 8192
    llm = make(max_num_batched_tokens=num_tokens)
    prompt = (llm.encode("Once upon a time a goose flew over the lake. ") * num_tokens)[:num_tokens]
    whole = 4 * num_tokens * llm.tokenizer.vocab_size
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=20), progress=False)
    assert len(entries(output)) == num_tokens - 1
    assert torch.cuda.max_memory_allocated() - before < whole // 4
    assert num_tokens > 8 * BLOCK_ROWS
