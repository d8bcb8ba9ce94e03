"""From a request's body to what the engine is asked for: prompts as token ids, sampling parameters, stops and flags.

Pure functions of the body and a `Context`, without HTTP and without an engine, so that the routes and batch processing
share them. Whatever is wrong is raised as InvalidRequestError naming the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from albatross.config import ModelProfile
from albatross.constants import END_OF_TEXT_ID
from albatross.errors import ConfigError, InvalidRequestError
from albatross.sampling_params import SamplingParams
from albatross.tokenizer.chat import ChatMessage, begins_answer, render_chat
from albatross.tokenizer.world import WorldTokenizer

from .asgi import is_request_id
from .errors import MODEL_NOT_FOUND
from .requests import (
    UNSUPPORTED,
    Body,
    ChatBody,
    ChatMessageBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    show,
    validate,
)

Kind = Literal["chat", "completion"]
MAX_STOPS = 16
_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "penalty_decay",
    "penalize_prompt", "sampler_order", "seed", "min_tokens", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Context:
    """What a body is read against: the served model and the engine's limit of choices."""

    tokenizer: WorldTokenizer
    profile: ModelProfile
    model_name: str
    max_num_choices: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One request, ready for `EngineClient.generate`, and how its answer is to look."""

    kind: Kind
    prompts: list[list[int]]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None  # alternatives shown in the field of this name; `params` has what all fields together need
    trim_leading_space: bool = False
    request_id: str | None = None
    ignored: tuple[str, ...] = ()

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of a choice; prompt p has the choices from p * n on."""
        return self.prompts[index // self.n]

    @property
    def num_scored_tokens(self) -> int:
        """Tokens of prompts, counted for each choice that shows them, whose log-probabilities the answer has."""
        return 0 if self.params.prompt_logprobs is None else self.n * sum(map(len, self.prompts))


def to_plan(kind: Kind, body: dict[str, Any], context: Context) -> Plan:
    """The plan of one parsed body of /v1/chat/completions or /v1/completions."""
    if kind == "chat":
        return _plan_chat(_check(validate(ChatBody, body), context), context)
    return _plan_completion(_check(validate(CompletionBody, body), context), context)


def check_model(name: str | None, served_name: str) -> None:
    """Raises InvalidRequestError with the code model_not_found unless `name` is empty or the served model's."""
    if name and name != served_name:
        raise InvalidRequestError(
            f"The model {show(name)} does not exist here; this server has {served_name}.", "model", MODEL_NOT_FOUND
        )


def check_profile(profile: ModelProfile) -> None:
    """Raises ConfigError if the profile's sampling defaults are no sampling parameters."""
    try:
        SamplingParams(**cast(dict[str, Any], profile.chat_sampling))
    except (TypeError, InvalidRequestError) as error:
        raise ConfigError(f"chat_sampling of the model profile is wrong: {error}") from None


def _check(request: Body, context: Context) -> Body:
    check_model(request.model, context.model_name)
    if request.request_id is not None and not is_request_id(request.request_id):
        raise InvalidRequestError("request_id must be 1 to 128 letters, digits and . _ : - characters.", "request_id")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true.", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs needs stream to be false; no chunk has a place for them.", "prompt_logprobs")
    return request


def _plan_chat(request: ChatBody, context: Context) -> Plan:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    messages = [_to_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)]
    own_stops = _parse_stop(request.stop)
    return _plan(
        "chat",
        request,
        prompts=[context.tokenizer.encode(render_chat(messages))],
        params=_sampling(
            request,
            context.profile.chat_sampling,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        ),
        stop=() if own_stops == () else (*context.profile.chat_stop, *(own_stops or ())),
        trim_leading_space=begins_answer(messages),
    )


def _plan_completion(request: CompletionBody, context: Context) -> Plan:
    return _plan(
        "completion",
        request,
        prompts=_parse_prompts(request.prompt, request.n or 1, context),
        params=_sampling(request, {}, logprobs=request.logprobs, prompt_logprobs=_scored_alternatives(request)),
        stop=_parse_stop(request.stop) or (),
        trim_leading_space=False,
        echo=bool(request.echo),
    )


def _scored_alternatives(request: CompletionBody) -> int | None:
    """The most alternatives that a field of the answer shows for a token of the prompt; None if none shows any."""
    wanted = (request.prompt_logprobs, request.logprobs if request.echo else None)
    return max((number for number in wanted if number is not None), default=None)


def _plan(
    kind: Kind,
    request: GenerationBody,
    *,
    prompts: list[list[int]],
    params: SamplingParams,
    stop: tuple[str, ...],
    trim_leading_space: bool,
    echo: bool = False,
) -> Plan:
    options = request.stream_options or StreamOptions()
    return Plan(
        kind=kind,
        prompts=prompts,
        params=params,
        n=request.n or 1,
        stop=stop,
        include_stop=bool(request.include_stop_str_in_output),
        priority=request.priority or 0,
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        echo=echo,
        prompt_logprobs=request.prompt_logprobs,
        trim_leading_space=trim_leading_space,
        request_id=request.request_id,
        ignored=request.ignored,
    )


def _sampling(
    request: ChatBody | CompletionBody, defaults: Mapping[str, float], *, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    values: dict[str, Any] = dict(defaults)
    values.update((name, value) for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias={_parse_bias_key(key): bias for key, bias in (request.logit_bias or {}).items()},
        stop_token_ids=tuple(request.stop_token_ids or ()),
    )


def _parse_bias_key(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequestError(f"logit_bias must have token ids as keys, but has {show(key)}.", "logit_bias")
    return int(key)


def _parse_stop(stop: Any) -> tuple[str, ...] | None:
    """The client's stop texts, or None where it sent none; an empty tuple is its wish for no stops at all."""
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(text, str) and text for text in stops):
        found = f"has {len(stop)}" if isinstance(stop, list) and len(stop) > MAX_STOPS else f"is {show(stop)}"
        raise InvalidRequestError(
            f"stop must be a text or an array of up to {MAX_STOPS} texts, none of them empty, but {found}.", "stop"
        )
    return tuple(stops)


def _to_message(message: ChatMessageBody, where: str) -> ChatMessage:
    for name in ("tool_calls", "function_call", "audio"):
        if (message.model_extra or {}).get(name):
            raise InvalidRequestError(
                f"{where}.{name} is not supported by this server; leave it out.", f"{where}.{name}", UNSUPPORTED
            )
    content: Any = message.content
    if content is None or isinstance(content, str):
        return ChatMessage(message.role, content or "")
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where}.content must be a text, an array of text parts or null, but is {show(content)}.", f"{where}.content"
        )
    return ChatMessage(message.role, "".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequestError(f'{where} must be an object like {{"type": "text", "text": "..."}}.', where)
    if kind != "text":
        raise InvalidRequestError(f"{where} is of type {show(kind)}; this model reads only text parts.", where, UNSUPPORTED)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be a text, but is {show(text)}.", f"{where}.text")
    return text


def _parse_prompts(prompt: Any, n: int, context: Context) -> list[list[int]]:
    """One list of ids per prompt. An array of numbers is one prompt; any other array holds one prompt in each place."""
    is_single = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and _is_number(prompt[0]))
    prompts = [prompt] if is_single else prompt
    if not isinstance(prompts, list) or not prompts:
        found = "an empty array" if prompt == [] else show(prompt)
        raise InvalidRequestError(
            f"prompt must be a text, an array of token ids, or an array of either, but is {found}.", "prompt"
        )
    if len(prompts) * n > context.max_num_choices:
        raise InvalidRequestError(
            f"A request may have at most {context.max_num_choices} choices, but {len(prompts)} prompts times n ({n}) are more.",
            "prompt" if n == 1 else "n",
        )
    return [_prompt_ids(item, "prompt" if is_single else f"prompt[{i}]", context) for i, item in enumerate(prompts)]


def _prompt_ids(prompt: Any, where: str, context: Context) -> list[int]:
    if isinstance(prompt, str):
        return context.tokenizer.encode(prompt) or [END_OF_TEXT_ID]
    if not isinstance(prompt, list) or not prompt or not all(type(token_id) is int for token_id in prompt):
        found = "an empty array" if prompt == [] else show(prompt)
        raise InvalidRequestError(f"{where} must be a text or an array of token ids, but is {found}.", where)
    return prompt


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
