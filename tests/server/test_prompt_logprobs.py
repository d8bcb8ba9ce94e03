"""echo and prompt_logprobs over HTTP: their shapes, whole and streamed; a prompt is scored only where an answer shows it."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from fakes import FakeEngine
from openai.types import Completion
from openai.types.chat import ChatCompletion
from sse import chunks, events, joined

from albatross_server import streaming
from albatross_server.routes import generation as route

pytestmark = pytest.mark.asyncio
COMPLETION = "/v1/completions"
ANSWER = " Hello there."
HI = [{"role": "user", "content": "hi"}]
CUT = [66, 230, 151]  # "A" and the first two bytes of a character


async def ask(client: httpx.AsyncClient, path: str = COMPLETION, **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def only_choice(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    (choice,) = (await ask(client, **fields))["choices"]
    return choice  # type: ignore[no-any-return]


async def stream(live: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await live.post(COMPLETION, json={"stream": True, **fields})
    assert response.status_code == 200, response.text
    return chunks(response.text)


async def test_an_echo_without_logprobs_is_text_alone(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await ask(client, prompt='Say "日本"\n', echo=True)
    Completion.model_validate_json(json.dumps(body), strict=True)
    choice = body["choices"][0]
    assert choice == {
        "index": 0, "text": 'Say "日本"\n' + ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": 0
    }  # fmt: skip
    assert engine.scored == []


async def test_logprobs_of_an_echo_cover_prompt_and_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    choice = await only_choice(client, prompt="AB 日x", echo=True, logprobs=1, max_tokens=2)
    assert choice["text"] == "AB 日x Hell"
    logprobs = choice["logprobs"]
    ids = engine.tokenizer.encode("AB 日x") + engine.tokenizer.encode(ANSWER)[:2]
    assert {len(column) for column in logprobs.values()} == {len(ids)}
    assert "".join(name for name in logprobs["tokens"] if not name.startswith("bytes:")).replace(" ", "") == "ABxHell"
    assert logprobs["token_logprobs"][:3] == [None, -0.125, -0.25]
    assert logprobs["token_logprobs"][-2:] == [-0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    likeliest = engine.tokenizer.texts[77]
    assert logprobs["top_logprobs"][1] == {likeliest: -0.0625, logprobs["tokens"][1]: -0.125}
    assert logprobs["text_offset"][0] == 0
    for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert name.startswith("bytes:") or choice["text"].startswith(name, offset)


async def test_no_number_in_an_answer_is_infinite(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    choice = await only_choice(client, prompt="ABC", echo=True, logprobs=2, max_tokens=0, prompt_logprobs=2)
    unlikely = engine.tokenizer.texts[228] or "bytes:\\xe3"
    assert choice["logprobs"]["top_logprobs"][1][unlikely] == -9999.0
    assert choice["prompt_logprobs"][1]["228"]["logprob"] == -9999.0


async def test_max_tokens_zero_scores_the_prompt_and_draws_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await ask(client, prompt="ABC", echo=True, logprobs=0, max_tokens=0)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ABC", "length", None)
    ids = engine.tokenizer.encode("ABC")
    assert choice["logprobs"]["token_logprobs"] == [None, *(-i / 8 for i in range(1, len(ids)))]
    assert choice["logprobs"]["top_logprobs"][1] == {choice["logprobs"]["tokens"][1]: -0.125}
    assert body["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}


async def test_max_tokens_zero_without_echo_is_an_empty_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    choice = await only_choice(client, prompt="ABC", max_tokens=0, logprobs=1)
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert choice["logprobs"]["tokens"] == []
    assert engine.scored == []


async def test_an_empty_prompt_is_its_end_of_text_token(client: httpx.AsyncClient) -> None:
    choice = await only_choice(client, prompt="", echo=True, logprobs=1, max_tokens=0)
    assert choice["text"] == ""
    assert choice["logprobs"] == {
        "tokens": ["<|endoftext|>"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]
    }  # fmt: skip


async def test_a_character_cut_at_the_end_of_a_prompt_keeps_the_offsets_right(client: httpx.AsyncClient) -> None:
    choice = await only_choice(client, prompt=CUT, echo=True, logprobs=0, max_tokens=2)
    assert choice["text"] == "A\ufffd Hell"
    assert choice["logprobs"]["tokens"][1:3] == ["bytes:\\xe5", "bytes:\\x96"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 5]
    assert choice["text"][choice["logprobs"]["text_offset"][3] :].startswith(choice["logprobs"]["tokens"][3])


async def test_prompts_and_choices_keep_their_order_and_each_prompt_is_scored_once(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.script = lambda prompt, choice: [*engine.tokenizer.encode(str(choice)), 0]
    body = await ask(client, prompt=[[66, 67], "A"], n=2, echo=True, logprobs=0)
    assert [choice["text"] for choice in body["choices"]] == ["AB0", "AB1", "A2", "A3"]
    first = [choice["logprobs"]["token_logprobs"][:2] for choice in body["choices"]]
    assert first == [[None, -0.125], [None, -0.125], [None, -0.25], [None, -0.25]]
    assert engine.scored == [2, 1]


async def test_a_stop_text_is_looked_for_in_the_answer_alone(client: httpx.AsyncClient) -> None:
    choice = await only_choice(client, prompt="Hello ", echo=True, stop="lo")
    assert (choice["text"], choice["stop_reason"]) == ("Hello  Hel", "lo")


@pytest.mark.parametrize("echo", [{}, {"echo": True, "logprobs": 2}])
async def test_prompt_logprobs_stand_in_each_choice_by_token_id(
    client: httpx.AsyncClient, engine: FakeEngine, echo: dict[str, Any]
) -> None:
    body = await ask(client, prompt=[66, 77, 230], n=2, max_tokens=1, prompt_logprobs=1, **echo)
    name = engine.tokenizer.texts[77]
    assert body["choices"][0]["prompt_logprobs"] == [
        None,
        {"77": {"logprob": -0.125, "rank": 1, "decoded_token": name}},
        {
            "230": {"logprob": -0.25, "rank": 2, "decoded_token": "bytes:\\xe5"},
            "77": {"logprob": -0.0625, "rank": 1, "decoded_token": name},
        },
    ]
    assert body["choices"][1]["prompt_logprobs"] == body["choices"][0]["prompt_logprobs"]
    assert engine.params[0].prompt_logprobs == echo.get("logprobs", 1)


async def test_a_chat_has_prompt_logprobs_beside_its_choices(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await ask(client, "/v1/chat/completions", messages=HI, prompt_logprobs=0, n=2)
    ChatCompletion.model_validate_json(json.dumps(body), strict=True)
    assert len(body["prompt_logprobs"]) == len(engine.prompts[0])
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][1][str(engine.prompts[0][1])]["rank"] == 1
    assert all("prompt_logprobs" not in choice for choice in body["choices"])


async def test_an_answer_that_shows_no_scores_asks_for_none(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await ask(client, prompt="ABC", logprobs=3, echo=False, prompt_logprobs=None)
    assert "prompt_logprobs" not in body["choices"][0]
    assert engine.params[0].prompt_logprobs is None


async def test_a_large_answer_is_written_off_the_event_loop(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    health_was_answered = threading.Event()
    whole_answer = route.whole_answer

    def wait_and_render(*arguments: Any) -> dict[str, Any]:
        assert health_was_answered.wait(5), "the event loop was blocked"
        return whole_answer(*arguments)

    monkeypatch.setattr(route, "whole_answer", wait_and_render)
    asking = asyncio.ensure_future(ask(client, prompt=[66] * 1000, n=5, echo=True, logprobs=1, max_tokens=0))
    await asyncio.sleep(0.05)
    assert (await client.get("/health")).status_code == 200
    assert not asking.done()
    health_was_answered.set()
    assert len((await asking)["choices"][4]["logprobs"]["tokens"]) == 1000


@pytest.mark.parametrize("long_echo", [4096, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "AB 日x"},
        {"prompt": "AB 日x", "logprobs": 2},
        {"prompt": "AB 日x", "logprobs": 2, "max_tokens": 0},
        {"prompt": "", "logprobs": 0, "max_tokens": 0},
        {"prompt": "", "max_tokens": 1},
        {"prompt": CUT, "logprobs": 1},
        {"prompt": ["A", "Hello B", CUT], "n": 3, "logprobs": 1, "return_token_ids": True},
        {"prompt": "Hello B", "stop": "lo", "logprobs": 1},
    ],
)
async def test_a_streamed_echo_is_the_whole_one_in_pieces(
    live: httpx.AsyncClient, fields: dict[str, Any], long_echo: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "LONG_ECHO", long_echo)
    whole = await ask(live, echo=True, **fields)
    found = await stream(live, echo=True, stream_options={"include_usage": True}, **fields)
    for choice in whole["choices"]:
        own = [each for chunk in found for each in chunk["choices"] if each["index"] == choice["index"]]
        assert joined(found, choice["index"]) == choice["text"]
        assert (own[-1]["finish_reason"], own[-1]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        for name, column in (choice["logprobs"] or {}).items():
            assert [entry for each in own if each["logprobs"] for entry in each["logprobs"][name]] == column
        assert [i for each in own for i in each.get("token_ids", [])] == choice.get("token_ids", [])
        assert own[0].get("prompt_token_ids") == choice.get("prompt_token_ids")
    assert found[-1]["usage"] == whole["usage"]


async def test_a_streamed_echo_comes_first_and_in_one_chunk(live: httpx.AsyncClient) -> None:
    found = await stream(live, prompt="Hello B", echo=True, logprobs=1)
    assert found[0]["choices"][0]["text"] == "Hello B"
    assert found[0]["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert None not in [value for chunk in found[1:] for value in (chunk["choices"][0]["logprobs"] or {"token_logprobs": []})[
        "token_logprobs"
    ]]  # fmt: skip


async def test_a_long_echo_is_written_off_the_event_loop(live: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    echo = streaming.Details.echo

    def spy(details: streaming.Details, text: str) -> bytes:
        threads.append(threading.current_thread())
        return echo(details, text)

    monkeypatch.setattr(streaming.Details, "echo", spy)
    monkeypatch.setattr(streaming, "LONG_ECHO", 4)
    await stream(live, prompt=[[66] * 4, [66] * 5], echo=True, logprobs=1, max_tokens=1)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_a_prompt_that_was_not_read_is_not_echoed(live: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fails_at = 0
    response = await live.post(COMPLETION, json={"prompt": "ABC", "echo": True, "logprobs": 1, "stream": True})
    (event,) = events(response.text)
    assert json.loads(event)["error"]["code"] == "generation_failed"
