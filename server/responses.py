"""The whole answers of /v1/chat/completions and /v1/completions, built from finished choices.

Pure functions without HTTP and without an engine; shared by the routes and batch processing.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from albatross.engine.client import EngineReady, PromptLogprobs, TokenLogprobs
from albatross.tokenizer.world import WorldTokenizer

from .logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from .plan import Kind, Plan

_ID_PREFIX: dict[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-"}


@dataclass(frozen=True, slots=True)
class AnswerMeta:
    """What every body and chunk of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(slots=True)
class FinishedChoice:
    """One complete choice. `num_tokens` counts drawn tokens, the one that ended the choice included; `text` is theirs alone."""

    index: int
    text: str
    num_tokens: int
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None


def make_meta(kind: Kind, model: str, fingerprint: str, request_id: str | None = None) -> AnswerMeta:
    return AnswerMeta(_ID_PREFIX[kind] + (request_id or uuid.uuid4().hex), int(time.time()), model, fingerprint)


def make_fingerprint(version: str, info: EngineReady | None) -> str:
    """Names all that a seeded answer depends on besides the request; which of several cards it ran on is not part of that."""
    if info is None:
        return f"albatross-{version}"
    kind = info.device.partition(":")[0]
    return f"albatross-{version}-{info.backend}-{info.dtype}-state-{info.state_dtype}-{kind}"


def make_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def whole_answer(plan: Plan, meta: AnswerMeta, choices: Sequence[FinishedChoice], tokenizer: WorldTokenizer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    render = _chat_choice if plan.kind == "chat" else _completion_choice
    body: dict[str, Any] = {
        "id": meta.id,
        "object": "chat.completion" if plan.kind == "chat" else "text_completion",
        "created": meta.created,
        "model": meta.model,
        "system_fingerprint": meta.system_fingerprint,
        "choices": [render(plan, choice, tokenizer) for choice in choices],
        "usage": make_usage(sum(map(len, plan.prompts)), sum(choice.num_tokens for choice in choices)),
    }
    if plan.kind == "chat":
        body |= _about_prompt(plan, choices[0], tokenizer)
    return body


def _chat_choice(plan: Plan, choice: FinishedChoice, tokenizer: WorldTokenizer) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None and plan.params.logprobs is not None:
        logprobs = chat_logprobs(tokenizer, choice.token_ids, choice.logprobs, plan.params.logprobs)
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs,
        **_ending(plan, choice),
    }


def _completion_choice(plan: Plan, choice: FinishedChoice, tokenizer: WorldTokenizer) -> dict[str, Any]:
    text = tokenizer.decode(plan.prompt_of(choice.index)) + choice.text if plan.echo else choice.text
    return {
        "index": choice.index,
        "text": text,
        "logprobs": _completion_logprobs(plan, choice, tokenizer),
        **_ending(plan, choice),
        **_about_prompt(plan, choice, tokenizer),
    }


def _completion_logprobs(plan: Plan, choice: FinishedChoice, tokenizer: WorldTokenizer) -> dict[str, Any] | None:
    if choice.logprobs is None or plan.params.logprobs is None:
        return None
    builder = CompletionLogprobs(tokenizer, plan.params.logprobs)
    if not plan.echo or choice.prompt_logprobs is None:
        return builder.render(choice.token_ids, choice.logprobs)
    echo = builder.echo(plan.prompt_of(choice.index), choice.prompt_logprobs)
    drawn = builder.render(choice.token_ids, choice.logprobs)
    return {name: column + drawn[name] for name, column in echo.items()}


def _about_prompt(plan: Plan, choice: FinishedChoice, tokenizer: WorldTokenizer) -> dict[str, Any]:
    """What the request wants to know of a choice's prompt: in its choice, or in a chat's body."""
    token_ids = plan.prompt_of(choice.index)
    fields: dict[str, Any] = {}
    if plan.return_token_ids:
        fields["prompt_token_ids"] = token_ids
    if plan.prompt_logprobs is not None and choice.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(tokenizer, token_ids, choice.prompt_logprobs, plan.prompt_logprobs)
    return fields


def _ending(plan: Plan, choice: FinishedChoice) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    if plan.return_token_ids:
        ending["token_ids"] = choice.token_ids
    return ending
