"""Offline generation with the demo model on the CPU: shapes of calls, refusals, and that nothing passes from one user of a slot
to the next."""

import pytest

from albatross import LLM, SamplingParams
from albatross.errors import CheckpointError, ConfigError, InvalidRequestError

PROMPT = "User: What is the capital of Ethiopia?\n\nAssistant:"
SECRET = "User: Remember: castle=26, anchor=63, cloud=47.\n\nAssistant: I will remember.\n\nUser: What is anchor?\n\nAssistant:"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SCORED = SamplingParams(temperature=0, max_tokens=12, logprobs=10)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", num_threads=1, max_num_seqs=4)


def texts(llm: LLM, *prompts: object, **options: object) -> list[str]:
    outputs = llm.generate(list(prompts), GREEDY, stop=["\n\n"], progress=False, **options)  # type: ignore[arg-type]
    return [choice.text for output in outputs for choice in output.choices]


def test_a_text_a_list_of_texts_and_ids_are_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    alone = llm.generate(PROMPT, GREEDY, stop=["\n\n"], progress=False)
    assert alone[0].choices[0].text == " Addis Ababa"
    assert alone[0].prompt_token_ids == ids
    assert texts(llm, PROMPT, ids) == [" Addis Ababa"] * 2
    assert llm.generate(ids, GREEDY, stop=["\n\n"], progress=False)[0].choices[0].text == " Addis Ababa"
    assert llm.generate([], progress=False) == []


def test_more_prompts_than_slots_keep_their_order(llm: LLM) -> None:
    cities = {"France": "Paris", "Kenya": "Nairobi", "Japan": "Tokyo", "Peru": "Lima", "Italy": "Rome", "Spain": "Madrid"}
    asked = [PROMPT.replace("Ethiopia", country) for country in cities]
    assert texts(llm, *asked) == [f" {city}" for city in cities.values()]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=limit) for limit in (1, 2)]
    outputs = llm.generate([PROMPT, PROMPT], params, progress=False)
    assert [len(output.choices[0].token_ids) for output in outputs] == [1, 2]
    with pytest.raises(InvalidRequestError, match="one a prompt"):
        llm.generate([PROMPT], params, progress=False)


def test_an_empty_text_starts_from_end_of_text(llm: LLM) -> None:
    output = llm.generate("", SamplingParams(seed=1, max_tokens=3), progress=False)[0]
    assert output.prompt_token_ids == [0]
    assert len(output.choices[0].token_ids) >= 1


def test_logprobs_come_with_each_token(llm: LLM) -> None:
    choice = llm.generate(PROMPT, SCORED, progress=False)[0].choices[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    for token_id, logprobs in zip(choice.token_ids, choice.logprobs, strict=True):
        assert logprobs.top_ids[0] == token_id
        assert logprobs.top_logprobs[0] == logprobs.logprob


def test_running_ahead_gives_the_same_answers(llm: LLM) -> None:
    """More requests than slots, stops of both kinds, and one that is left in the middle."""
    ahead = LLM(device="cpu", num_threads=1, max_num_seqs=4, run_ahead=1)
    prompts = [PROMPT.replace("Ethiopia", country) for country in ("France", "Kenya", "Japan", "Peru", "Italy", "Spain")]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=4 + 4 * i, logprobs=2) for i in range(len(prompts))]
    stream = ahead.stream(PROMPT, SamplingParams(ignore_eos=True))
    next(stream)
    stream.close()
    expected, found = (
        [choice for output in each.generate(prompts, params, stop=["\n\n"], n=2, progress=False) for choice in output.choices]
        for each in (llm, ahead)
    )
    assert [choice.token_ids for choice in found] == [choice.token_ids for choice in expected]
    assert [choice.text for choice in found] == [choice.text for choice in expected]
    assert ahead._core.stats().discarded_tokens > 0
    assert ahead._core.stats().num_running == 0


def test_the_next_user_of_a_slot_starts_from_nothing() -> None:
    fresh = LLM(device="cpu", num_threads=1, max_num_seqs=1).generate(PROMPT, SCORED, progress=False)
    used = LLM(device="cpu", num_threads=1, max_num_seqs=1)
    assert texts(used, SECRET) == [" 63"]
    stream = used.stream(SECRET, GREEDY)
    next(stream)
    stream.close()
    again = used.generate(PROMPT, SCORED, progress=False)
    assert again[0].choices[0].logprobs == fresh[0].choices[0].logprobs


def test_a_stream_gives_the_same_text_and_frees_its_slot_when_closed(llm: LLM) -> None:
    assert "".join(llm.stream(PROMPT, GREEDY, stop=["\n\n"])) == " Addis Ababa"
    stream = llm.stream(PROMPT, SamplingParams(ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm._core.has_work
    assert llm._core.stats().num_running == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate([[70000]], progress=False), "70000"),
        (lambda llm: llm.generate([PROMPT, [-3]], progress=False), "-3"),
        (lambda llm: llm.generate([[]], progress=False), "at least one token"),
        (lambda llm: llm.generate([5, "x"], progress=False), "bare ids"),
        (lambda llm: llm.generate(PROMPT, n=5, progress=False), "slots"),
        (lambda llm: llm.generate(PROMPT, SamplingParams(stop_token_ids=(5000,)), progress=False), "5000"),
        (lambda llm: llm.generate("\ud83d", progress=False), "surrogate"),
    ],
)
def test_impossible_calls_are_refused_before_anything_runs(llm: LLM, call: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        call(llm)  # type: ignore[operator]
    assert not llm._core.has_work


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"model": "/nowhere/x.pth"}, CheckpointError, "/nowhere/x.pth"),
        ({"device": "cuda:99"}, ConfigError, "cuda:99"),
        ({"device": "cpu", "backend": "native"}, ConfigError, "reference"),
        ({"max_num_sequences": 3}, ConfigError, "max_num_sequences"),
        ({"device": "cpu", "max_num_seqs": 10**9}, ConfigError, "max_num_seqs"),
    ],
)
def test_a_model_that_cannot_run_as_asked_is_refused(settings: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(**settings)  # type: ignore[arg-type]
