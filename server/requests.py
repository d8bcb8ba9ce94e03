"""The bodies of /v1/chat/completions and /v1/completions: their fields, their types, and what is not supported yet.

Types are strict: "0.5" is no number and true is no integer. Ranges are left to `SamplingParams`, values of several
shapes (prompt, stop, content) to `plan`. Knows no engine; called by `plan` and, for its schemas, by the OpenAPI document.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from albatross.constants import MAX_LOGPROBS
from albatross.errors import InvalidRequestError

UNSUPPORTED = "unsupported_parameter"
# Bookkeeping of hosted services and hints without effect on the text: accepted from anybody, used by nobody.
WITHOUT_EFFECT = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
    "verbosity", "parallel_tool_calls",
})  # fmt: skip


class StreamOptions(BaseModel):
    """`include_usage`: one last chunk with the totals. `continuous_usage_stats`: running totals in every chunk."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatMessageBody(BaseModel):
    """One turn. `content` may be null, a string, or an array of text parts."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", title="ChatMessage")

    role: str
    content: SkipValidation[str | list[dict[str, Any]] | None] = None


class GenerationBody(BaseModel):
    """The fields that both routes share. Absent and null mean the default."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, description="The served model's name; may be left out.")
    max_tokens: int | None = Field(None, ge=0, description="Longest answer in tokens; bounded by the server's own limit.")
    n: int | None = Field(None, ge=1, description="Answers per prompt.")
    best_of: int | None = Field(None, description="Refused unless it equals n.")
    temperature: float | None = Field(None, description="0 to 2; 0 takes the likeliest token.")
    top_p: float | None = Field(None, description="0 to 1; 0 takes the likeliest token.")
    top_k: int | None = Field(None, description="0 and -1 mean off.")
    min_p: float | None = Field(None, description="0 to 1.")
    presence_penalty: float | None = Field(None, description="-2 to 2.")
    frequency_penalty: float | None = Field(None, description="-2 to 2.")
    repetition_penalty: float | None = Field(None, description="0.01 to 10; 1 changes nothing.")
    penalty_decay: float | None = Field(None, description="0 to 1, the factor of every count in each step; 1 is OpenAI's law.")
    penalize_prompt: bool | None = Field(None, description="Whether tokens of the prompt count for the penalties.")
    sampler_order: Literal["temperature-first", "rwkv-classic"] | None = Field(
        None, description="rwkv-classic applies top_p before the temperature, as older RWKV code did."
    )
    logit_bias: dict[str, float] | None = Field(None, description="Token ids (as strings) to values from -100 to 100.")
    seed: int | None = Field(None, description="The same seed draws the same tokens, alone or in any batch.")
    stop: SkipValidation[str | list[str] | None] = Field(
        None, description="Up to 16 texts that end the answer; an empty array also turns the model's own stops off."
    )
    stop_token_ids: list[int] | None = Field(None, description="Ids that end the answer and are no part of its text.")
    include_stop_str_in_output: bool | None = Field(None, description="Whether a matched stop text ends the answer's text.")
    min_tokens: int | None = Field(None, description="Tokens drawn before the answer may end.")
    ignore_eos: bool | None = Field(None, description="Whether the answer goes on after the end-of-text token.")
    stream: bool | None = Field(None, description="Whether the answer comes as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="include_usage, continuous_usage_stats: needs stream.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Alternatives shown for each token of the prompt, beside the token itself; needs stream to be false.",
    )
    return_token_ids: bool | None = Field(None, description="Whether prompt and answer are also given as token ids.")
    priority: int | None = Field(None, description="Lower runs earlier.")
    request_id: str | None = Field(None, description="The id of the answer, its log line and its headers.")

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields that were sent and have no meaning here."""
        return tuple(name for name in self.model_extra or () if name not in WITHOUT_EFFECT and name not in MUST_BE_NEUTRAL)


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    model_config = ConfigDict(title="ChatCompletionRequest")

    messages: list[ChatMessageBody] = Field(description="Turns with role (system, developer, user, assistant, tool) and content.")
    max_completion_tokens: int | None = Field(None, ge=0, description="Wins over max_tokens.")
    logprobs: bool | None = Field(None, description="Whether log-probabilities of the drawn tokens are given.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives shown for each token; needs logprobs."
    )


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(title="CompletionRequest")

    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]] = Field(
        description="Text, token ids, or an array of either. Empty text starts from the end-of-text token."
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives shown for each token; with echo, also for those of the prompt."
    )
    echo: bool | None = Field(
        None, description="Whether the text begins with the prompt, whose tokens logprobs then covers; max_tokens 0 adds no more."
    )
    max_completion_tokens: int | None = Field(None, ge=0, description="Wins over max_tokens.")


def _only(*neutral: Any) -> Callable[[Any, dict[str, Any]], bool]:
    return lambda value, _: value in neutral


def _without_tools(_: Any, body: dict[str, Any]) -> bool:
    return not body["tools"] or body.get("tool_choice") == "none"


def _text_modality(value: Any, _: Any) -> bool:
    return value in ([], ["text"])


# Fields that would change the answer: refused unless null or of the value that changes nothing, or known to the route.
MUST_BE_NEUTRAL: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "tools": _without_tools,
    "tool_choice": _only("none", "auto"),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "response_format": _only({"type": "text"}),
    "structured_outputs": _only({}),
    "guided_json": _only(),
    "guided_regex": _only(),
    "guided_choice": _only(),
    "guided_grammar": _only(),
    "regex": _only(),
    "ebnf": _only(),
    "grammar": _only(),
    "json_schema": _only(),
    "modalities": _text_modality,
    "audio": _only(),
    "web_search_options": _only(),
    "reasoning_effort": _only("none"),
    "thinking_token_budget": _only(),
    "chat_template": _only(),
    "chat_template_kwargs": _only({}),
    "continue_final_message": _only(True),
    "add_generation_prompt": _only(True),
    "echo": _only(False),
    "suffix": _only(""),
    "logprobs_mode": _only("raw_logprobs"),
    "bad_words": _only([]),
    "allowed_token_ids": _only(),
    "truncate_prompt_tokens": _only(-1),
    "prompt_embeds": _only(),
    "use_beam_search": _only(False),
    "length_penalty": _only(1, 1.0),
}

Body = TypeVar("Body", bound=GenerationBody)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises InvalidRequestError on NaN, huge numbers, lone surrogates and broken UTF-8 too."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The body must be a JSON object, but is of type {_json_type(value)}.")
    return value


def validate(model: type[Body], body: dict[str, Any]) -> Body:
    """The typed body. Raises InvalidRequestError naming the first field that is wrong or not supported."""
    for name, value in body.items():
        is_neutral = MUST_BE_NEUTRAL.get(name)
        if is_neutral is not None and name not in model.model_fields and value is not None and not is_neutral(value, body):
            raise InvalidRequestError(f"{name} is not supported by this server; leave it out.", name, UNSUPPORTED)
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise _first_mistake(error) from None
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequestError(
            f"best_of is supported only where it equals n ({request.n or 1}), but is {request.best_of}.", "best_of", UNSUPPORTED
        )
    return request


def _first_mistake(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return InvalidRequestError(f"{path} is missing; it is required.", path)
    expected = first["msg"].replace("Input should be", "must be", 1)
    return InvalidRequestError(f"{path} {expected}, but is {show(first['input'])}.", path)


def show(value: Any) -> str:
    """A value from a body in at most about 60 characters, for an error's text."""
    if isinstance(value, dict | list):
        return f"of type {_json_type(value)}"
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
