"""Odd bodies: each is answered as documented, never with 500, and the server answers after every one of them."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fakes import VOCAB_SIZE, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from albatross.config import EngineConfig, ServerConfig
from albatross_server.app import App, create_app
from albatross_server.errors import ErrorBody

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
NESTED = "[" * 500 + "]" * 500

# path, body, status, param of the error
TABLE: list[tuple[str, Any, int, str | None]] = [
    (CHAT, [], 400, None),
    (CHAT, "hi", 400, None),
    (CHAT, None, 400, None),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": None}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": ["hi"]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "narrator", "content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 200, None),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, 200, None),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, 200, None),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, 200, None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, 200, None),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "assistant", "content": "Hello"}]}, 200, None),
    (CHAT, {"messages": [{"role": "system", "content": "Be brief."}]}, 200, None),
    (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, 400, "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "user", "content": "a\x00b"}]}, 200, None),
    (CHAT, {"messages": HI, "n": 0}, 400, "n"),
    (CHAT, {"messages": HI, "n": -1}, 400, "n"),
    (CHAT, {"messages": HI, "n": True}, 400, "n"),
    (CHAT, {"messages": HI, "max_tokens": None}, 200, None),
    (CHAT, {"messages": HI, "max_tokens": 0}, 200, None),
    (CHAT, {"messages": HI, "max_tokens": 10**9}, 200, None),
    (CHAT, {"messages": HI, "max_tokens": -1}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 1.5}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": "5"}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 10**30}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": -1}, 400, "max_completion_tokens"),
    (CHAT, {"messages": HI, "temperature": None}, 200, None),
    (CHAT, {"messages": HI, "temperature": 0}, 200, None),
    (CHAT, {"messages": HI, "temperature": 1e-9}, 200, None),
    (CHAT, {"messages": HI, "temperature": 2}, 200, None),
    (CHAT, {"messages": HI, "temperature": 2.0001}, 400, "temperature"),
    (CHAT, {"messages": HI, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": HI, "temperature": "0.5"}, 400, "temperature"),
    (CHAT, {"messages": HI, "temperature": True}, 400, "temperature"),
    (CHAT, {"messages": HI, "top_p": 0}, 200, None),
    (CHAT, {"messages": HI, "top_p": 0.9}, 200, None),
    (CHAT, {"messages": HI, "top_p": 1.1}, 400, "top_p"),
    (CHAT, {"messages": HI, "top_k": -1}, 200, None),
    (CHAT, {"messages": HI, "top_k": 10**9}, 200, None),
    (CHAT, {"messages": HI, "top_k": -2}, 400, "top_k"),
    (CHAT, {"messages": HI, "min_p": 2}, 400, "min_p"),
    (CHAT, {"messages": HI, "seed": 2**64}, 400, "seed"),
    (CHAT, {"messages": HI, "seed": -1}, 200, None),
    (CHAT, {"messages": HI, "presence_penalty": 3}, 400, "presence_penalty"),
    (CHAT, {"messages": HI, "repetition_penalty": 0}, 400, "repetition_penalty"),
    (CHAT, {"messages": HI, "penalty_decay": 1.5}, 400, "penalty_decay"),
    (CHAT, {"messages": HI, "sampler_order": "magic"}, 400, "sampler_order"),
    (CHAT, {"messages": HI, "stop": None}, 200, None),
    (CHAT, {"messages": HI, "stop": []}, 200, None),
    (CHAT, {"messages": HI, "stop": ["a", "b", "c", "d", "e"]}, 200, None),
    (CHAT, {"messages": HI, "stop": ["x"] * 17}, 400, "stop"),
    (CHAT, {"messages": HI, "stop": ""}, 400, "stop"),
    (CHAT, {"messages": HI, "stop": ["a", ""]}, 400, "stop"),
    (CHAT, {"messages": HI, "stop": [5]}, 400, "stop"),
    (CHAT, {"messages": HI, "stop": {"a": 1}}, 400, "stop"),
    (CHAT, {"messages": HI, "stop_token_ids": [VOCAB_SIZE]}, 400, "stop_token_ids"),
    (CHAT, {"messages": HI, "stop_token_ids": [-1]}, 400, "stop_token_ids"),
    (CHAT, {"messages": HI, "logit_bias": {"17": 5}}, 200, None),
    (CHAT, {"messages": HI, "logit_bias": {"x": 5}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"-1": 5}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"٣": 5}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {str(VOCAB_SIZE): 5}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"17": 101}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"17": "5"}}, 400, "logit_bias.17"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": 5}, 400, "logprobs"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHAT, {"messages": HI, "stream_options": None}, 200, None),
    (CHAT, {"messages": HI, "stream": "yes"}, 400, "stream"),
    (CHAT, {"messages": HI, "request_id": "a b"}, 400, "request_id"),
    (CHAT, {"messages": HI, "min_tokens": 5, "max_tokens": 2}, 400, "min_tokens"),
    (CHAT, {"messages": HI, "model": ""}, 200, None),
    (CHAT, {"messages": HI, "model": "gpt-4o"}, 404, "model"),
    (CHAT, {"messages": HI, "model": 5}, 400, "model"),
    (CHAT, {"messages": HI, "unheard_of": NESTED}, 200, None),
    (CHAT, {"messages": HI, "tools": []}, 200, None),
    (CHAT, {"messages": HI, "tools": [{}], "tool_choice": "none"}, 200, None),
    (CHAT, {"messages": HI, "tools": [{}]}, 400, "tools"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "functions": [{}]}, 400, "functions"),
    (CHAT, {"messages": HI, "response_format": {"type": "text"}}, 200, None),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, 400, "response_format"),
    (CHAT, {"messages": HI, "structured_outputs": {"regex": "a"}}, 400, "structured_outputs"),
    (CHAT, {"messages": HI, "reasoning_effort": "high"}, 400, "reasoning_effort"),
    (CHAT, {"messages": HI, "modalities": ["text"]}, 200, None),
    (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, 400, "modalities"),
    (CHAT, {"messages": HI, "best_of": 2}, 400, "best_of"),
    (COMPLETION, {}, 400, "prompt"),
    (COMPLETION, {"prompt": None}, 400, "prompt"),
    (COMPLETION, {"prompt": ""}, 200, None),
    (COMPLETION, {"prompt": []}, 400, "prompt"),
    (COMPLETION, {"prompt": [[]]}, 400, "prompt[0]"),
    (COMPLETION, {"prompt": ["a", 5]}, 400, "prompt[1]"),
    (COMPLETION, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETION, {"prompt": [1.5]}, 400, "prompt"),
    (COMPLETION, {"prompt": [True]}, 400, "prompt"),
    (COMPLETION, {"prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETION, {"prompt": [VOCAB_SIZE]}, 400, "prompt"),
    (COMPLETION, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 17}, 400, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 6, "n": 3}, 400, "n"),
    (COMPLETION, {"prompt": "a", "echo": False, "suffix": None}, 200, None),
    (COMPLETION, {"prompt": "a", "echo": True}, 200, None),
    (COMPLETION, {"prompt": "a", "echo": True, "logprobs": 20, "max_tokens": 0}, 200, None),
    (COMPLETION, {"prompt": "a", "echo": "yes"}, 400, "echo"),
    (COMPLETION, {"prompt": "a", "echo": 1}, 400, "echo"),
    (CHAT, {"messages": HI, "echo": False}, 200, None),
    (CHAT, {"messages": HI, "echo": True}, 400, "echo"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": 1}, 200, None),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": None, "stream": True}, 200, None),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": 21}, 400, "prompt_logprobs"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": -1}, 400, "prompt_logprobs"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": 1.5}, 400, "prompt_logprobs"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": True}, 400, "prompt_logprobs"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": "1"}, 400, "prompt_logprobs"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": 0, "stream": True}, 400, "prompt_logprobs"),
    (CHAT, {"messages": HI, "prompt_logprobs": 20}, 200, None),
    (CHAT, {"messages": HI, "prompt_logprobs": 21}, 400, "prompt_logprobs"),
    (CHAT, {"messages": HI, "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    (COMPLETION, {"prompt": "a", "best_of": 2, "n": 2}, 200, None),
    (COMPLETION, {"prompt": "a", "best_of": 3, "n": 2}, 400, "best_of"),
    (COMPLETION, {"prompt": "a", "logprobs": True}, 400, "logprobs"),
    (COMPLETION, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
]
BROKEN = {
    "cut off": b'{"prompt": "a"',
    "empty": b"",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "a number beyond float64": b'{"prompt": "a", "temperature": 1e999}',
    "a lone surrogate": b'{"prompt": "\\ud83d"}',
    "bytes that are not UTF-8": b'{"prompt": "\xff"}',
    "nesting without end": b'{"prompt": ' + b"[" * 100000,
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
}


def check_error(response: httpx.Response, status: int) -> ErrorBody:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return ErrorBody.model_validate_json(response.content, strict=True)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body", "status", "param"), TABLE, ids=[json.dumps(row[:2])[:100] for row in TABLE])
async def test_an_odd_body_is_answered_as_documented(
    client: httpx.AsyncClient, path: str, body: Any, status: int, param: str | None
) -> None:
    if isinstance(body, dict):
        body = {"max_tokens": 20, **body}
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    if status != 200:
        error = check_error(response, status).error
        assert error.param == param
        assert error.type == "invalid_request_error"
        assert error.message.endswith(".")
        assert len(error.message) < 300
    after = await client.post(COMPLETION, json={"prompt": "a"})
    assert after.status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN.keys())
async def test_what_is_not_json_is_refused(client: httpx.AsyncClient, raw: bytes) -> None:
    error = check_error(await client.post(COMPLETION, content=raw), 400).error
    assert error.code == "invalid_json"


@pytest.mark.asyncio
async def test_deep_nesting_in_an_ignored_field_is_no_failure(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETION, content=b'{"prompt": "a", "extra": ' + NESTED.encode() + b"}")
    assert response.status_code == 200


@pytest.mark.asyncio
async def test_what_is_not_supported_says_so_with_its_code(client: httpx.AsyncClient) -> None:
    error = check_error(await client.post(CHAT, json={"messages": HI, "tools": [{}]}), 400).error
    assert error.code == "unsupported_parameter"
    assert "tools" in error.message


@pytest.mark.asyncio
async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for stream in (False, True):
        response = await client.post(COMPLETION, json={"prompt": [66] * 1001, "stream": stream})
        error = check_error(response, 400).error
        assert error.code == "context_length_exceeded"
        assert "1000" in error.message
        assert "1001" in error.message
    assert (await client.post(COMPLETION, json={"prompt": [66] * 1000})).status_code == 200
    assert len(engine.prompts) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4),
    max_leaves=8,
)
field_names = st.sampled_from([
    "model", "messages", "prompt", "max_tokens", "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "repetition_penalty", "penalty_decay", "sampler_order", "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens",
    "ignore_eos", "stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "priority", "request_id",
    "response_format", "tools", "tool_choice", "echo", "prompt_logprobs", "include_stop_str_in_output", "user",
])  # fmt: skip
bodies = st.dictionaries(field_names, json_values, max_size=6)


@pytest.fixture(scope="module")
def fuzzed_app() -> App:
    engine = FakeEngine(EngineConfig(max_output_tokens=20))
    return create_app(ServerConfig(), engine.config, engine)  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "base"), [(CHAT, {"messages": HI}), (COMPLETION, {"prompt": "a"})])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(fields=bodies)
def test_no_body_is_ever_answered_with_500(fuzzed_app: App, path: str, base: dict[str, Any], fields: dict[str, Any]) -> None:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(fuzzed_app), base_url="http://test") as client:
            return await client.post(path, content=json.dumps({**base, **fields}))

    response = asyncio.run(ask())
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        check_error(response, response.status_code)
