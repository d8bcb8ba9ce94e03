"""Command-line flags made from the settings schemas: one for each field, with its type, bounds, default and meaning.

Knows nothing of what a setting does. Only flags that were given reach the settings class, so that environment
variables and defaults keep their places below them. Used by the commands in this folder.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

import msgspec
import typer
from rich.markup import escape

from albatross.config import EngineConfig, ServerConfig
from albatross.sampling_params import SamplingParams

PANELS: dict[type, str] = {EngineConfig: "Engine", ServerConfig: "Server"}
METAVARS = {int: "N", float: "X", bool: "", str: "TEXT"}  # short, so that flags keep their full names in a narrow terminal
SAMPLING_HELP = {
    "temperature": "Randomness of the draw, 0 to 2; 0 takes the likeliest token, 1 is the model's own.",
    "top_p": "Draw from the likeliest tokens that together reach this probability; 1 is off.",
    "top_k": "Draw from this many of the likeliest tokens; 0 is off.",
    "min_p": "Leave out tokens less likely than this share of the likeliest one; 0 is off.",
    "presence_penalty": "Taken off the logit of every token drawn before; 0 is off.",
    "frequency_penalty": "Taken off the logit once for each time a token was drawn; 0 is off.",
    "repetition_penalty": "Divides positive and multiplies negative logits of tokens drawn before; 1 is off.",
    "penalty_decay": "Factor on the frequency counts in each step; 1 keeps them.",
    "penalize_prompt": "Let the prompt's tokens count as drawn.",
    "sampler_order": "Apply the temperature first, or after top_p as older RWKV code did.",
    "seed": "The same seed draws the same tokens; without it, each run differs.",
    "max_tokens": "Most tokens to draw; without it, until the model stops.",
    "min_tokens": "Tokens drawn before the answer may end.",
    "ignore_eos": "Go on after the end-of-text token.",
}


@dataclass(frozen=True)
class SamplingFlags:
    """The sampling flags that were given."""

    given: dict[str, Any]

    def over(self, defaults: dict[str, Any]) -> SamplingParams:
        """Parameters from `defaults` with the given flags laid over them. Raises InvalidRequestError."""
        return SamplingParams(**(defaults | self.given))


def with_flags(*, positional: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces each parameter of a command that is a settings class, or SamplingFlags, by one flag for each of its fields.

    The command is called with the finished settings. Fields named in `positional` become arguments.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {}
        for parameter in inspect.signature(command).parameters.values():
            expansion = _expand(parameter.annotation, positional)
            if expansion is None:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            build, flags = expansion
            groups[parameter.name] = build, [each.name for each in flags]
            parameters += flags

        @functools.wraps(command)
        def call(**values: Any) -> None:
            for name, (build, fields) in groups.items():
                given = {field: values.pop(field) for field in fields}
                values[name] = build({field: value for field, value in given.items() if value is not None})
            command(**values)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def sampling_fields() -> Iterator[msgspec.structs.FieldInfo]:
    """The fields of SamplingParams that one flag can hold: all but lists of ids, maps and logprobs."""
    return (field for field in msgspec.structs.fields(SamplingParams) if field.name in SAMPLING_HELP)


def bounds(field: Any) -> dict[str, Any]:
    """The inclusive bounds of a pydantic field, under the names that typer gives them."""
    found = {}
    for mark in field.metadata:
        for name, key in (("ge", "min"), ("le", "max")):
            if (limit := getattr(mark, name, None)) is not None:
                found[key] = limit
    return found


Expansion = tuple[Callable[[dict[str, Any]], Any], list[inspect.Parameter]]


def _expand(annotation: Any, positional: tuple[str, ...]) -> Expansion | None:
    if annotation is SamplingFlags:
        return SamplingFlags, [_sampling_flag(field) for field in sampling_fields()]
    if annotation in PANELS:
        flags = [_settings_flag(annotation, name, field, name in positional) for name, field in annotation.model_fields.items()]
        return lambda given: annotation(**dict(_as_setting(annotation, *item) for item in given.items())), flags
    return None


def _settings_flag(schema: type, name: str, field: Any, is_argument: bool) -> inspect.Parameter:
    if is_argument:
        argument = typer.Argument(help=_help(field.description, field.default), show_default=False)
        return _parameter(name, field.annotation, argument)
    named = option_name(name, field.default)
    description = field.description if named == name else f"Switch this off: {field.description}"
    return _option(named, field.annotation, field.default, description, PANELS[schema], **bounds(field))


def option_name(name: str, default: Any) -> str:
    """The parameter that stands for a setting: what is on by default has a flag that switches it off."""
    return "no_" + name if default is True else name


def _as_setting(schema: type, name: str, value: Any) -> tuple[str, Any]:
    """The setting that a given parameter stands for, and its value."""
    return (name, value) if name in schema.model_fields else (name.removeprefix("no_"), not value)  # type: ignore[attr-defined]


def _sampling_flag(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    return _option(field.name, field.type, None, SAMPLING_HELP[field.name], "Sampling")  # the defaults are the command's


def _option(name: str, annotation: Any, default: Any, description: str, panel: str, **limits: Any) -> inspect.Parameter:
    kind = _without_none(annotation)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    text = f"{description} One of {', '.join(choices)}." if choices else description
    return _parameter(name, annotation, typer.Option(
        flag(name), help=_help(text, default), show_default=False, rich_help_panel=panel,
        metavar="WORD" if choices else METAVARS.get(kind), **limits,
    ))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(description: str, default: Any) -> str:
    if isinstance(default, bool) or default is None or default == "":
        return escape(description)
    return f"{escape(description)} [dim]{escape(f'[default: {default}]')}[/dim]"


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    optional: Any = Optional[_without_none(annotation)]  # noqa: UP045 (the type is known at run time only)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[optional, option]
    )


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not types.NoneType]
    return kinds[0]
