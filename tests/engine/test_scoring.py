"""Prompt log-probabilities of the demo model on the CPU: the float64 reference's, whatever the chunks and neighbours."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from scripted import VOCAB, Engine
from torch.utils._python_dispatch import TorchDispatchMode

from albatross import LLM, SamplingParams
from albatross.engine.messages import AbortRequest, AddRequest, StepOutput, pack_ids
from albatross.engine.model_runner import ModelRunner
from albatross.engine.output_processor import deliver_scores
from albatross.engine.prompt_logprobs import PromptLogprobs, PromptTokenLogprobs
from albatross.engine.scoring import BLOCK_ROWS
from albatross.errors import InvalidRequestError
from albatross.reference import rwkv7 as reference

TEXT = "User: What is the capital of Ethiopia?\n\nAssistant: Addis Ababa\n\nUser: And of Kenya? 日本\n\nAssistant:"
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
TOLERANCE = 1e-4
POISON = 3000  # an id whose embedding a test fills with NaN


def make(budget: int, num_slots: int = 4, **settings: Any) -> LLM:
    slots = min(num_slots, budget)
    return LLM(device="cpu", num_threads=1, max_num_seqs=slots, max_num_batched_tokens=budget, **settings)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make(64)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Callable[[list[int]], torch.Tensor]:
    """Log-probabilities [T, V] in float64: row i is what the model expects at place i + 1."""
    weights = {name: tensor.double() for name, tensor in torch.load(llm.config.model_path, weights_only=True).items()}

    def compute(ids: list[int]) -> torch.Tensor:
        logits, _ = reference.forward(weights, torch.tensor(ids), reference.zero_state(weights))
        return logits.log_softmax(-1)

    return compute


def check(found: list[PromptTokenLogprobs | None] | None, ids: list[int], logprobs: torch.Tensor, num_top: int) -> None:
    assert found is not None
    assert len(found) == len(ids)
    assert found[0] is None
    for place, entry in enumerate(found[1:], start=1):
        row = logprobs[place - 1]
        assert entry is not None
        assert entry.logprob == pytest.approx(row[ids[place]].item(), abs=TOLERANCE)
        above = (row > row[ids[place]] + TOLERANCE).sum().item()
        not_below = (row > row[ids[place]] - TOLERANCE).sum().item()  # the token itself is one of these
        assert above < entry.rank <= not_below
        assert entry.top_logprobs == pytest.approx(row.topk(num_top).values.tolist(), abs=TOLERANCE)
        assert entry.top_logprobs == pytest.approx(row[list(entry.top_ids)].tolist(), abs=TOLERANCE)
        assert len(set(entry.top_ids)) == num_top


def scores(llm: LLM, prompt: object, params: SamplingParams = SCORE, **options: Any) -> list[PromptTokenLogprobs | None] | None:
    return llm.generate([prompt], params, progress=False, **options)[0].prompt_logprobs  # type: ignore[list-item]


@pytest.mark.parametrize("budget", [1, 7, 16, 256])
def test_any_chunks_give_the_scores_of_the_float64_reference(
    budget: int, expected: Callable[[list[int]], torch.Tensor]
) -> None:
    llm = make(budget)
    ids = llm.encode(TEXT)
    check(scores(llm, TEXT), ids, expected(ids), 3)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_prompts_scored_together_and_beside_streams_get_their_own(
    expected: Callable[[list[int]], torch.Tensor], run_ahead: int
) -> None:
    """Numbers of alternatives differ, some do not ask, and prompts of one token stand among them."""
    llm = make(24, run_ahead=run_ahead)
    prompts = [llm.encode(text) for text in (TEXT, "User: Hi", TEXT[30:], "A", "User: What is 7 plus 8?\n\nAssistant:", TEXT)]
    numbers = [2, None, 0, 5, 20, 1]
    params = [SamplingParams(temperature=0, max_tokens=3 * i, prompt_logprobs=n, logprobs=1) for i, n in enumerate(numbers)]
    outputs = llm.generate(prompts, params, progress=False)
    for output, number in zip(outputs, numbers, strict=True):
        if number is None:
            assert output.prompt_logprobs is None
        else:
            check(output.prompt_logprobs, output.prompt_token_ids, expected(output.prompt_token_ids), number)


def test_asking_changes_nothing_of_what_is_drawn() -> None:
    llm = make(256, prefill_pace=0)  # so that the same steps give the same bits
    prompts = [TEXT, TEXT[:40], "Hi"]
    asking = SamplingParams(temperature=0, max_tokens=12, logprobs=1, prompt_logprobs=2)
    plain, scored = (llm.generate(prompts, params, progress=False) for params in (GREEDY, asking))
    assert [output.choices for output in plain] == [output.choices for output in scored]


def test_a_prompt_of_one_token_has_nothing_to_score(llm: LLM) -> None:
    assert scores(llm, [5]) == [None]
    assert scores(llm, "") == [None]


def test_a_prompt_is_scored_once_for_all_its_choices(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    step = llm._core.step

    def spy() -> StepOutput:
        output = step()
        pieces.extend(len(piece.columns.logprobs) // 4 for piece in output.scores)
        return output

    monkeypatch.setattr(llm._core, "step", spy)
    output = llm.generate(TEXT, SamplingParams(seed=1, max_tokens=2, prompt_logprobs=1), n=3, progress=False)[0]
    assert len(output.choices) == 3
    assert sum(pieces) == len(output.prompt_token_ids) - 1
    assert output.prompt_logprobs == scores(llm, TEXT, SamplingParams(max_tokens=0, prompt_logprobs=1))


class _LargestLogits(TorchDispatchMode):
    """Remembers the most rows of any tensor whose last dimension is the vocabulary, but for views of the head's weights."""

    def __init__(self, head: torch.Tensor) -> None:
        super().__init__()
        self.num_rows = 0
        self._vocab_size = len(head)
        self._head = head.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == self._vocab_size:
                is_head = tensor.untyped_storage().data_ptr() == self._head
                self.num_rows = max(self.num_rows, 0 if is_head else tensor.numel() // self._vocab_size)
        return result


def test_logits_of_a_whole_prompt_never_exist_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    large = make(1024)
    runner = large._core.runner
    assert isinstance(runner, ModelRunner)
    launch = runner.launch
    seen = _LargestLogits(runner.model._head)

    def watch(step: Any) -> Any:
        with seen:
            return launch(step)

    monkeypatch.setattr(runner, "launch", watch)
    prompt = large.encode(TEXT * 12)[: 3 * BLOCK_ROWS]
    found = scores(large, prompt, SamplingParams(max_tokens=1, prompt_logprobs=20))
    assert runner.vocab_size not in (runner.model.config.hidden_size, runner.model.config.ffn_size)
    assert seen.num_rows == BLOCK_ROWS
    assert found is not None
    assert len(found) == 3 * BLOCK_ROWS


@contextlib.contextmanager
def poisoned(llm: LLM) -> Iterator[None]:
    runner = llm._core.runner
    assert isinstance(runner, ModelRunner)
    row = runner.model._embedding[POISON]
    kept = row.clone()
    with torch.inference_mode():
        row.fill_(torch.nan)
        yield
        row.copy_(kept)


@pytest.mark.parametrize("place", [0, 20, -2])  # in the first chunk, in the middle, and in the last
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_scores_that_are_not_finite_end_their_request_alone(place: int, max_tokens: int) -> None:
    llm = make(16)
    ids = llm.encode(TEXT)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=1)
    expected = llm.generate([ids, ids], params, n=2, progress=False)[0]
    bad = [*ids]
    bad[place] = POISON
    with poisoned(llm):
        good, failed = llm.generate([ids, bad], params, n=2, progress=False)
    assert [choice.finish_reason for choice in failed.choices] == ["error"] * 2
    assert all("not finite" in (choice.error or "") for choice in failed.choices)
    assert failed.prompt_logprobs is None
    assert [choice.token_ids for choice in good.choices] == [choice.token_ids for choice in expected.choices]
    check_equal(good.prompt_logprobs, expected.prompt_logprobs)
    assert llm._core.stats().num_running == 0
    check_equal(scores(llm, ids, params), expected.prompt_logprobs)


def check_equal(found: list[PromptTokenLogprobs | None] | None, expected: list[PromptTokenLogprobs | None] | None) -> None:
    assert found is not None
    assert expected is not None
    values = [[entry.logprob for entry in each if entry is not None] for each in (found, expected)]
    assert len(values[0]) == len(found) - 1
    assert values[0] == pytest.approx(values[1], abs=TOLERANCE)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_after_an_abort_no_scores_come(run_ahead: int) -> None:
    llm = make(16, run_ahead=run_ahead)
    core, ids = llm._core, llm.encode(TEXT)
    core.add(AddRequest((1, 2), pack_ids(ids), SamplingParams(max_tokens=3, prompt_logprobs=1)))
    assert [piece.stream_ids for piece in core.step().scores] == [(1, 2)]
    core.abort(AbortRequest((1,)))
    assert [piece.stream_ids for piece in core.step().scores] == [(2,)]
    core.abort(AbortRequest((2,)))
    while core.has_work:
        assert core.step().scores == ()
    assert core.stats().num_running == 0


def test_a_piece_finds_its_prompt_by_any_choice_that_is_left(llm: LLM) -> None:
    (_, second) = llm.submit(llm.encode(TEXT)[:30], SCORE, n=2)
    output = llm._core.step()
    deliver_scores(output.scores, {second.stream_id: second})
    assert second.prompt_logprobs is not None
    assert len(second.prompt_logprobs) == 30
    llm.abort(list(llm._choices.values()))


def test_requests_that_do_not_ask_have_nothing_scored() -> None:
    engine = Engine(budget=16)
    engine.add(1, prompt=list(range(1, 60)), params=SamplingParams(max_tokens=1, logprobs=1))
    engine.drain()
    assert not any(chunk.targets for step in engine.runner.steps for chunk in step.chunks)
    assert all(output.scores == () for output in engine.outputs)


def test_each_token_but_the_first_is_a_target_once() -> None:
    engine = Engine(budget=16)
    prompt = [1 + i % (VOCAB - 1) for i in range(60)]
    engine.core.add(AddRequest((1,), pack_ids(prompt), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)))
    targets: list[int] = []
    while engine.core.has_work:
        step = engine.core.scheduler.schedule()
        if not step.is_empty:
            assert all(len(chunk.tokens) - len(chunk.targets) == chunk.is_last for chunk in step.chunks)
            targets += [token for chunk in step.chunks for token in chunk.targets]
        engine.core.scheduler.settle(step, [0] * len(step.draws), [False] * len(step.draws))
    assert targets == prompt[1:]


@pytest.mark.parametrize("value", [-1, 21, True, 1.5, "3"])
def test_an_impossible_number_of_alternatives_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)  # type: ignore[arg-type]


def test_scores_are_looked_at_like_a_list(llm: LLM) -> None:
    choices = llm.submit(llm.encode(TEXT), SCORE)
    for _ in llm.run():
        pass
    found = choices[0].prompt_logprobs
    assert isinstance(found, PromptLogprobs)
    whole = list(found)
    assert found[-1] == whole[-1] != whole[1] == found[1]
    assert found[:2] == whole[:2]
    assert found[5:1:-2] == whole[5:1:-2]
    with pytest.raises(IndexError):
        found[len(whole)]
