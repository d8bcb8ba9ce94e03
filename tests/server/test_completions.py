"""Whole answers of /v1/completions: prompts of every shape, neutral sampling, and its own logprobs."""

import asyncio
import threading
from typing import Any

import httpx
import pytest
from fakes import FakeEngine
from openai.types import Completion

from albatross.sampling_params import SamplingParams

pytestmark = pytest.mark.asyncio


async def ask(client: httpx.AsyncClient, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    Completion.model_validate_json(response.content, strict=True)
    return response.json()  # type: ignore[no-any-return]


async def test_an_answer_has_every_field_of_the_api_and_keeps_its_space(client: httpx.AsyncClient) -> None:
    body = await ask(client, "Hi")
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": " Hello there.", "logprobs": None, "finish_reason": "stop", "stop_reason": 0}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", [[0]]),
        (["", "A"], [[0], [66]]),
        ([66, 67], [[66, 67]]),
        ([[66], [67, 68]], [[66], [67, 68]]),
        (["A", [67]], [[66], [67]]),
        ("Assistant: ", None),
    ],
)
async def test_prompts_of_every_shape_are_read(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, expected: list[list[int]] | None
) -> None:
    body = await ask(client, prompt)
    assert engine.prompts == (expected if expected is not None else [engine.tokenizer.encode(prompt)])
    assert body["usage"]["prompt_tokens"] == sum(map(len, engine.prompts))


async def test_a_trailing_space_stays_in_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, "Assistant: ")
    assert engine.prompts[0][-1] == 33


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, choice: [*prompt, 0]
    body = await ask(client, ["A", "B"], n=2, return_token_ids=True)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "A"), (1, "A"), (2, "B"), (3, "B")]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[66], [66], [67], [67]]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}


async def test_silence_means_neutral_sampling_and_no_stops(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, "A")
    assert engine.params == [SamplingParams()]
    assert engine.stops == [()]


async def test_logprobs_have_the_completion_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, choice: [*engine.tokenizer.encode("日x"), 0]
    ids = engine.script([], 0)
    logprobs = (await ask(client, "A", logprobs=1))["choices"][0]["logprobs"]
    assert logprobs["tokens"][-2:] == ["x", "<|endoftext|>"]
    assert logprobs["token_logprobs"] == [-0.25] * len(ids)
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][-2:] == [1, 2]
    assert logprobs["top_logprobs"][-2] == {"x": -0.25}


async def test_the_drawn_token_is_always_among_the_alternatives(client: httpx.AsyncClient) -> None:
    logprobs = (await ask(client, "A", logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {" He": -0.25}


async def test_max_completion_tokens_is_taken_here_too(client: httpx.AsyncClient) -> None:
    assert (await ask(client, "A", max_tokens=5, max_completion_tokens=2))["usage"]["completion_tokens"] == 2


async def test_a_large_prompt_is_read_off_the_event_loop(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    health_was_answered = threading.Event()
    encode = engine.tokenizer.encode

    def wait_and_encode(text: str) -> list[int]:
        assert health_was_answered.wait(5), "the event loop was blocked"
        return encode(text[:8])

    monkeypatch.setattr(engine.tokenizer, "encode", wait_and_encode)
    asking = asyncio.ensure_future(ask(client, "word " * 20000))
    await asyncio.sleep(0.05)
    assert (await client.get("/health")).status_code == 200
    assert not asking.done()
    health_was_answered.set()
    await asking
