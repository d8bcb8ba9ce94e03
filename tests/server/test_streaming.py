"""Event streams over a real connection: shape, order, equality with whole answers, errors on the way, keep-alive."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fakes import FakeEngine
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from sse import chunks, events, joined

from albatross.config import ServerConfig

pytestmark = pytest.mark.asyncio
HI = [{"role": "user", "content": "hi"}]


async def chat(live: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await live.post("/v1/chat/completions", json={"messages": HI, "stream": True, **fields})
    assert response.status_code == 200, response.text
    found = chunks(response.text)
    for chunk in found:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    return found


async def test_headers_tell_proxies_not_to_hold_the_stream_back(live: httpx.AsyncClient) -> None:
    response = await live.post("/v1/chat/completions", json={"messages": HI, "stream": True}, headers={"x-request-id": "r-7"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "r-7"
    assert chunks(response.text)[0]["id"] == "chatcmpl-r-7"


async def test_a_chat_stream_opens_with_the_role_and_ends_with_the_reason(live: httpx.AsyncClient) -> None:
    first, *middle, last = await chat(live)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": 0}


async def test_every_chunk_has_the_same_identity(live: httpx.AsyncClient) -> None:
    found = await chat(live, stream_options={"include_usage": True})
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in found}) == 1
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}


@pytest.mark.parametrize("fields", [{}, {"stop": "the"}, {"max_tokens": 3}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}])
async def test_text_usage_and_reason_are_those_of_the_whole_answer(live: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    whole = (await live.post("/v1/chat/completions", json={"messages": HI, **fields})).json()
    found = await chat(live, **fields, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        index = choice["index"]
        assert joined(found, index) == choice["message"]["content"]
        (ending,) = [c for chunk in found for c in chunk["choices"] if c["index"] == index and c["finish_reason"]]
        assert (ending["finish_reason"], ending["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        entries = [
            e
            for chunk in found
            for c in chunk["choices"]
            if c["index"] == index and c["logprobs"]
            for e in c["logprobs"]["content"]
        ]
        assert entries == (choice["logprobs"] or {"content": []})["content"]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]


async def test_without_the_option_no_chunk_speaks_of_usage(live: httpx.AsyncClient) -> None:
    assert all("usage" not in chunk for chunk in await chat(live))
    assert all("usage" not in chunk for chunk in await chat(live, stream_options={}))


async def test_with_the_option_all_chunks_but_the_last_have_null_usage(live: httpx.AsyncClient) -> None:
    *others, last = await chat(live, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["usage"]["total_tokens"] > 0


async def test_running_totals_grow_to_the_last_usage(live: httpx.AsyncClient) -> None:
    _, *found = await chat(live, stream_options={"include_usage": True, "continuous_usage_stats": True})
    totals = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert totals == sorted(totals)
    assert totals[-1] == totals[-2]


async def test_each_of_n_choices_has_its_own_role_text_and_end(live: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, choice: [*engine.tokenizer.encode(f" {choice}" + "x" * choice), 0]
    found = [chunk["choices"][0] for chunk in await chat(live, n=3)]
    for index in range(3):
        own = [choice for choice in found if choice["index"] == index]
        assert own[0]["delta"].get("role") == "assistant"
        assert own[-1]["finish_reason"] == "stop"
        assert sum(choice["finish_reason"] is not None for choice in own) == 1


async def test_a_character_of_several_tokens_arrives_whole(live: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = " 안녕 🎉 👨‍👩‍👧"
    engine.script = lambda prompt, choice: [*engine.tokenizer.encode(text), 0]
    found = await chat(live)
    assert joined(found) == text[1:]
    assert not any("\ufffd" in joined([chunk]) for chunk in found)
    assert all(joined([chunk]) for chunk in found[1:-1]), "an empty delta was sent"


async def test_text_that_json_must_escape_survives(live: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = ' "quoted"\\ \n\n\t\x00\u2028 </script>'
    engine.script = lambda prompt, choice: [*engine.tokenizer.encode(text), 0]
    assert joined(await chat(live)) == text[1:]


async def test_tokens_that_gathered_go_out_as_one_chunk(live: httpx.AsyncClient, engine: FakeEngine) -> None:
    # The engine makes its steps without ever letting the stream's task run in between.
    async def burst(scripts: dict[int, list[int]], params: Any) -> None:
        await asyncio.sleep(0.05)
        for step in range(8):
            for stream_id, script in scripts.items():
                engine._step(stream_id, step, script, params, 8)

    engine._draw = burst  # type: ignore[method-assign]
    found = await chat(live)
    assert len(found) == 3
    assert joined(found) == "Hello there."


async def test_completions_stream_in_their_own_shape(live: httpx.AsyncClient) -> None:
    response = await live.post(
        "/v1/completions",
        json={
            "prompt": ["A", "B"],
            "n": 2,
            "stream": True,
            "logprobs": 1,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        },
    )
    found = chunks(response.text)
    for chunk in found:
        Completion.model_validate_json(
            json.dumps({**chunk, "choices": [c for c in chunk["choices"] if c["finish_reason"]]}), strict=True
        )
    assert [joined(found, index) for index in range(4)] == [" Hello there."] * 4
    for index in range(4):
        own = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["prompt_token_ids"] == [66 + index // 2]
        assert [offset for choice in own for offset in choice["logprobs"]["text_offset"]][:3] == [0, 3, 5]
        assert sum(len(choice["token_ids"]) for choice in own) == 8
    assert found[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 32, "total_tokens": 34}


async def test_an_error_in_mid_stream_is_the_last_event_and_no_done_follows(live: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fails_at = 3
    response = await live.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    *before, last = events(response.text)
    assert joined(map(json.loads, before)) == "Hello"
    assert json.loads(last) == {
        "error": {
            "message": "The logits of this request were not finite.", "type": "server_error", "param": None,
            "code": "generation_failed",
        }
    }  # fmt: skip


async def test_an_engine_that_dies_ends_the_stream_with_its_error(live: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.held.clear()
    asking = asyncio.ensure_future(live.post("/v1/chat/completions", json={"messages": HI, "stream": True}))
    while not engine.running:
        await asyncio.sleep(0.005)
    engine.die()
    response = await asking
    error = json.loads(events(response.text)[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")


async def test_the_openai_client_reads_the_stream(live: httpx.AsyncClient) -> None:
    async with AsyncOpenAI(api_key="none", base_url=str(live.base_url.join("/v1"))) as openai:
        stream = await openai.chat.completions.create(model="gosling", messages=HI, stream=True)  # type: ignore[call-overload]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        whole = await openai.completions.create(model="gosling", prompt="A")
    assert text == "Hello there."
    assert whole.choices[0].text == " Hello there."


class TestSilence:
    """A silent engine."""

    @pytest.fixture
    def server_config(self) -> ServerConfig:
        return ServerConfig(port=0, keep_alive_s=0.05)

    async def test_a_silent_stream_gets_comments_from_acceptance_on(self, live: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.held.clear()
        asyncio.get_running_loop().call_later(0.28, engine.held.set)
        response = await live.post("/v1/completions", json={"prompt": "A", "stream": True})
        assert 3 <= response.text.count(": keep-alive\n\n") <= 5
        assert response.text.startswith(": keep-alive\n\n")
        assert joined(chunks(response.text)) == " Hello there."

    async def test_a_busy_stream_gets_no_comments(self, live: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.step_s = 0.02
        response = await live.post("/v1/completions", json={"prompt": "A", "stream": True})
        assert "keep-alive" not in response.text
