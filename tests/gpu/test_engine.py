"""The engine on a CUDA card in float16: the demo model's answers at several concurrencies, graphs, running ahead, repeats, and
what it leaves behind."""

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from albatross import LLM, SamplingParams
from albatross.config import EngineConfig
from albatross.engine.client import EngineClient
from albatross.engine.model_runner import ModelRunner
from albatross.engine.output_processor import Choice
from albatross.engine.sizes import graph_sizes, mixed_sizes
from albatross.errors import ConfigError
from albatross.llm import RequestOutput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.timeout(600),
]
DATA = Path(__file__).parent.parent / "data"
GREEDY = SamplingParams(temperature=0, max_tokens=400)
NUM_SLOTS = 256  # of the engines that run out of memory


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm._core.runner
    assert isinstance(runner, ModelRunner)
    return runner


def bits(outputs: list[RequestOutput]) -> list[object]:
    """All that was drawn, with logprobs to the last bit."""
    return [(choice.token_ids, choice.logprobs) for output in outputs for choice in output.choices]


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
    runner = runner_of(llm)
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


@pytest.mark.parametrize("number", [1, 8])
def test_a_replay_of_its_own_size_has_the_bits_of_a_launched_step(rows: list[dict[str, Any]], number: int) -> None:
    """The budget is that of the prompts together, so that the step that reads them has a graph of its size as well."""
    params = SamplingParams(seed=3, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=3, frequency_penalty=0.2)
    llm = LLM(device="cpu")
    prompts = [llm.encode(row["prompt"]) for row in rows[:number]]
    limits = {"max_num_seqs": number, "max_num_batched_tokens": sum(map(len, prompts))}
    launched, replayed = (LLM(**limits, device="cuda", cuda_graphs=is_on) for is_on in (False, True))
    plain, graphed = (llm.generate(prompts, params, progress=False) for llm in (launched, replayed))
    assert bits(plain) == bits(graphed)


def test_running_ahead_changes_no_bit(rows: list[dict[str, Any]]) -> None:
    """More prompts than slots and different lengths, so that slots are handed on while steps are in flight; no stops, whose
    rows too many would change the numbers of rows, and no pace, by which these would follow measured times."""
    prompts = [row["prompt"] for row in rows[:30]]
    params = [
        SamplingParams(seed=i, temperature=i % 3 / 2, max_tokens=5 + 3 * i, ignore_eos=True, logprobs=2, presence_penalty=i % 2)
        for i in range(len(prompts))
    ]
    waiting, ahead = (LLM(max_num_seqs=8, device="cuda", run_ahead=depth, prefill_pace=0) for depth in (0, 1))
    assert bits(waiting.generate(prompts, params, n=2, progress=False)) == bits(
        ahead.generate(prompts, params, n=2, progress=False)
    )
    assert ahead._core.stats().discarded_tokens == 0


def test_stops_found_late_change_no_answer(rows: list[dict[str, Any]]) -> None:
    prompts = [row["prompt"] for row in rows[:40]]
    params = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=(11,))
    waiting, ahead = (LLM(max_num_seqs=8, device="cuda", run_ahead=depth) for depth in (0, 1))
    expected, found = (llm.generate(prompts, params, progress=False) for llm in (waiting, ahead))
    assert [o.choices[0].token_ids for o in expected] == [o.choices[0].token_ids for o in found]
    assert waiting._core.stats().discarded_tokens == 0
    assert 0 < ahead._core.stats().discarded_tokens <= len(prompts)


def test_a_row_that_is_not_finite_ends_alone(rows: list[dict[str, Any]]) -> None:
    llm = LLM(max_num_seqs=8, device="cuda")
    prompts = [llm.encode(row["prompt"]) for row in rows[:8]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def play(poisoned: int | None) -> tuple[list[list[int]], list[Choice]]:
        choices = [llm.submit(prompt, params)[0] for prompt in prompts]
        tokens: dict[Choice, list[int]] = {choice: [] for choice in choices}
        for choice, delta in llm.run():
            tokens[choice] += delta.token_ids
            if poisoned is not None and choice is choices[poisoned] and len(tokens[choice]) == 10:
                stream, _ = llm._core.scheduler._streams[choice.stream_id]
                with torch.inference_mode():
                    runner_of(llm).pool.wkv[stream.slot].fill_(torch.nan)
        return list(tokens.values()), choices

    expected, _ = play(None)
    found, choices = play(3)
    assert choices[3].finish_reason == "error"
    assert "not finite" in (choices[3].error or "")
    assert found[3] == expected[3][: len(found[3])]
    assert 10 <= len(found[3]) <= 12
    assert [found[i] for i in range(8) if i != 3] == [expected[i] for i in range(8) if i != 3]
    assert play(None)[0] == expected


def test_padding_of_a_replayed_step_touches_no_slot() -> None:
    runner = runner_of(LLM(max_num_seqs=8, device="cuda"))
    assert runner.graphs is not None
    with torch.inference_mode():
        runner.pool.wkv.normal_()
        runner.pool.shift.normal_()
        runner.sampler.last_token.fill_(5)
        tensors = (runner.pool.wkv, runner.pool.shift, runner.sampler.last_token, runner.sampler.position)
        before = [tensor.clone() for tensor in tensors]
        runner.graphs.run_decode([4, 0, 6])
    others = [1, 2, 3, 5, 7]
    assert all(torch.equal(tensor[others], old[others]) for tensor, old in zip(tensors, before, strict=True))
    assert not torch.equal(runner.pool.wkv[4], before[0][4])
    assert (runner.sampler.position - before[3]).tolist() == [1, 0, 0, 0, 1, 0, 1, 0]


def test_every_graph_is_timed_at_the_start_and_leaves_no_trace() -> None:
    runner = runner_of(LLM(max_num_seqs=40, max_num_batched_tokens=300, device="cuda"))
    sizes = [[timing.size for timing in runner.timings if timing.is_mixed is is_mixed] for is_mixed in (False, True)]
    assert sizes == [graph_sizes(40), mixed_sizes(300)]
    assert all(0 < timing.seconds < 1 for timing in runner.timings)
    assert not runner.pool.wkv.any()
    assert not runner.pool.shift.any()
    assert not runner.sampler.position.any()


def test_running_streams_keep_their_pace_while_a_long_prompt_is_read() -> None:
    """Eight streams beside a prompt of 60,000 tokens: its steps stay short, and it is read to its end."""
    llm = LLM(max_num_seqs=9, device="cuda")
    endless = SamplingParams(temperature=0, max_tokens=20_000, ignore_eos=True)
    streams = [llm.submit([5, 6, 7], endless)[0] for _ in range(8)]
    long: Choice | None = None
    step_ms: dict[bool, list[float]] = {False: [], True: []}
    for choice, _ in llm.run():
        if choice is streams[0]:
            step_ms[long is not None].append(llm._core.stats().step_ms)
        if long is None and streams[0].num_tokens == 200:
            long = llm.submit([9] * 60_000, SamplingParams(temperature=0, max_tokens=1))[0]
        if long is not None and long.finish_reason:
            llm.abort(streams)
    normal, beside = (sorted(step_ms[is_beside]) for is_beside in (False, True))
    # Not a high quantile: some steps of a sixth of a millisecond wait for the host.
    assert beside[len(beside) // 2] < 5 * normal[len(normal) // 2]


@pytest.mark.parametrize("share", [0.1, 0.6])  # of what they take: too little for the first capture, and for all
def test_graphs_that_do_not_fit_are_refused_and_take_nothing(share: float) -> None:
    llm = LLM(max_num_seqs=NUM_SLOTS, device="cuda", cuda_graphs=False)
    llm.generate(["Hi"] * NUM_SLOTS, SamplingParams(max_tokens=2), progress=False)  # what libraries take once is taken
    runner = runner_of(llm)

    def capture() -> Tensor:
        return runner._capture(1024, 1).run_decode(range(NUM_SLOTS)).clone()

    def reserved() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    with torch.inference_mode():
        before = reserved()
        torch.cuda.reset_peak_memory_stats()
        expected = capture()
        needed = torch.cuda.max_memory_reserved() - before
        del expected
        allocated, limit = torch.cuda.memory_allocated(), reserved() + int(share * needed)
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        try:
            with pytest.raises(ConfigError, match=r"256 rows and 1024 tokens needs more than the \d+\.\d+ GiB .* cuda_graphs"):
                capture()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        reserved()
        assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
        assert capture().shape == (NUM_SLOTS, runner.vocab_size)


async def test_an_engine_that_does_not_fit_says_so_and_leaves_no_process() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    rest = torch.empty(free - (5 << 29), dtype=torch.uint8, device="cuda")  # leaves 2.5 GiB: a context and the model, no more
    client = await EngineClient.start(EngineConfig(device="cuda", max_num_seqs=4096, state_dtype="float32"))
    with pytest.raises(ConfigError, match=r"needs .*\d GiB .* lower max_num_seqs"):
        await asyncio.wait_for(client.wait_ready(), 120)
    process = client._workers[0].supervisor._process
    assert process is not None
    assert process.returncode is not None
    await client.close()
    del rest
    torch.cuda.empty_cache()


def test_forked_choices_equal_separate_requests() -> None:
    llm = LLM(max_num_seqs=8, device="cuda")
    prompt = "User: Name the planets of the solar system.\n\nAssistant:"
    forked = llm.generate(prompt, GREEDY, stop=["\n\n"], n=4, progress=False)[0]
    assert len({choice.text for choice in forked.choices}) == 1
    assert "Neptune" in forked.choices[0].text
