"""Whole answers of /v1/chat/completions: what is asked of the engine, and what the client gets."""

from typing import Any

import httpx
import pytest
from fakes import FakeEngine
from openai.types.chat import ChatCompletion

from albatross.config import ModelProfile

pytestmark = pytest.mark.asyncio
HI = [{"role": "user", "content": "hi"}]


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate_json(response.content, strict=True)
    return response.json()  # type: ignore[no-any-return]


async def test_an_answer_has_every_field_of_the_api(client: httpx.AsyncClient) -> None:
    body = await ask(client, model="gosling")
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "gosling"
    assert body["system_fingerprint"] == "albatross-0.1.0-reference-float32-state-float32-cpu"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there.", "refusal": None}
    assert choice["logprobs"] is None
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 0)


async def test_usage_counts_the_prompt_and_every_drawn_token_with_the_one_that_ended_the_answer(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    usage = (await ask(client))["usage"]
    drawn = len(engine.script([], 0))
    assert usage == {
        "prompt_tokens": len(engine.prompts[0]), "completion_tokens": drawn, "total_tokens": len(engine.prompts[0]) + drawn,
    }  # fmt: skip


async def test_messages_become_the_trained_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, messages=[{"role": "system", "content": "Be brief."}, *HI])
    assert engine.tokenizer.decode(engine.prompts[0]) == "System: Be brief.\n\nUser: hi\n\nAssistant:"


async def test_an_answer_loses_exactly_one_leading_space(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, choice: [*engine.tokenizer.encode("  two"), 0]
    assert (await ask(client))["choices"][0]["message"]["content"] == " two"


async def test_a_last_message_of_the_assistant_is_continued_with_its_space(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, choice: [*engine.tokenizer.encode(" world"), 0]
    body = await ask(client, messages=[*HI, {"role": "assistant", "content": "Hello"}])
    assert engine.tokenizer.decode(engine.prompts[0]).endswith("Assistant: Hello")
    assert body["choices"][0]["message"]["content"] == " world"


async def test_silence_means_the_sampling_of_the_model_profile(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, top_p=0.9, temperature=None)
    profile = ModelProfile().chat_sampling
    params = engine.params[0]
    assert params.top_p == 0.9
    assert params.temperature == profile["temperature"]
    assert params.presence_penalty == profile["presence_penalty"]
    assert params.penalty_decay == profile["penalty_decay"]


async def test_every_sampling_field_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.5, "penalty_decay": 0.75, "penalize_prompt": True, "sampler_order": "rwkv-classic", "seed": 11,
        "min_tokens": 2, "ignore_eos": False, "max_tokens": 12,
    }  # fmt: skip
    await ask(client, **fields, logit_bias={"17": -3}, stop_token_ids=[261])
    params = engine.params[0]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {17: -3}
    assert params.stop_token_ids == (261,)


async def test_max_completion_tokens_wins(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await ask(client, max_tokens=1, max_completion_tokens=3)
    assert body["usage"]["completion_tokens"] == 3
    assert body["choices"][0]["finish_reason"] == "length"


async def test_max_tokens_zero_gives_no_text_and_finish_length(client: httpx.AsyncClient) -> None:
    body = await ask(client, max_tokens=0)
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, ("\n\nUser:", "\n\nSystem:", "\nUser:")),
        ("END", ("\n\nUser:", "\n\nSystem:", "\nUser:", "END")),
        (["a", "b"], ("\n\nUser:", "\n\nSystem:", "\nUser:", "a", "b")),
        ([], ()),
    ],
)
async def test_stops_are_the_profiles_and_the_clients(
    client: httpx.AsyncClient, engine: FakeEngine, stop: Any, expected: tuple[str, ...]
) -> None:
    await ask(client, stop=stop)
    assert engine.stops == [expected]


async def test_a_stop_text_ends_the_answer_and_is_named(client: httpx.AsyncClient) -> None:
    (choice,) = (await ask(client, stop="the"))["choices"]
    assert choice["message"]["content"] == "Hello "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "the")


async def test_a_stop_text_is_shown_if_asked_for(client: httpx.AsyncClient) -> None:
    (choice,) = (await ask(client, stop="the", include_stop_str_in_output=True))["choices"]
    assert choice["message"]["content"] == "Hello the"


async def test_n_choices_have_their_own_index_and_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, choice: [*engine.tokenizer.encode(f" I am {choice}" + "!" * choice), 0]
    body = await ask(client, n=3, best_of=3)
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [
        (0, "I am 0"), (1, "I am 1!"), (2, "I am 2!!"),
    ]  # fmt: skip
    assert body["usage"]["completion_tokens"] == sum(len(engine.script([], i)) for i in range(3))
    assert body["usage"]["prompt_tokens"] == len(engine.prompts[0])


async def test_text_parts_are_joined(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await ask(client, messages=[{"role": "user", "content": parts}])
    assert engine.tokenizer.decode(engine.prompts[0]) == "User: ab\n\nAssistant:"


async def test_logprobs_have_the_chat_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, choice: [*engine.tokenizer.encode("é"), engine.tokenizer.encode("日")[0], 0]
    (choice,) = (await ask(client, logprobs=True, top_logprobs=3))["choices"]
    whole, broken, end = choice["logprobs"]["content"]
    assert (whole["token"], whole["bytes"], whole["logprob"]) == ("é", [0xC3, 0xA9], -0.25)
    assert broken["token"].startswith("bytes:\\x")
    assert bytes(broken["bytes"]) == bytes.fromhex(broken["token"].removeprefix("bytes:").replace("\\x", ""))
    assert (end["token"], end["bytes"]) == ("<|endoftext|>", [])
    assert [top["logprob"] for top in whole["top_logprobs"]] == [-0.25, -2.0, -9999.0]


async def test_logprobs_without_alternatives_show_the_drawn_token_alone(client: httpx.AsyncClient) -> None:
    (choice,) = (await ask(client, logprobs=True))["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]][:2] == [" He", "ll"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


async def test_token_ids_are_returned_if_asked_for(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await ask(client, return_token_ids=True)
    assert body["prompt_token_ids"] == engine.prompts[0]
    assert body["choices"][0]["token_ids"] == engine.script([], 0)


async def test_the_request_id_of_the_body_is_in_the_answer_and_its_header(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/chat/completions", json={"messages": HI, "request_id": "mine-1"}, headers={"x-request-id": "other"}
    )
    assert response.json()["id"] == "chatcmpl-mine-1"
    assert response.headers["x-request-id"] == "mine-1"


async def test_fields_without_effect_are_taken_and_unknown_ones_are_listed(client: httpx.AsyncClient) -> None:
    fields = {"user": "u", "metadata": {}, "store": True, "tools": [{}], "tool_choice": "none", "top_a": 1, "a\r\nb: c": 2}
    response = await client.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "top_a, a??b??c"


async def test_without_unknown_fields_there_is_no_header_for_them(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": HI})
    assert "x-ignored-params" not in response.headers
