"""Offline use: a model, prompts, answers. The shortest whole path through the engine, and the first file to read.

Text becomes ids, ids become requests, each `step` runs all of them once, and what was drawn becomes text again. The
server does the same with the engine in a process of its own.
"""

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from albatross.config import DEMO_MODEL, EngineConfig
from albatross.constants import END_OF_TEXT_ID
from albatross.engine.client import check_prompt
from albatross.engine.core import EngineCore
from albatross.engine.messages import AbortRequest, AddRequest, FinishReason, StepOutput, TokenLogprobs, pack_ids, unpack_ids
from albatross.engine.output_processor import Choice, Delta, deliver_scores
from albatross.engine.process import build_core
from albatross.engine.prompt_logprobs import PromptLogprobs, PromptTokenLogprobs
from albatross.errors import InvalidRequestError
from albatross.sampling_params import SamplingParams
from albatross.tokenizer.world import WorldTokenizer

Prompt = str | Sequence[int]


@dataclass(slots=True)
class CompletionOutput:
    """One finished choice. logprobs is parallel to token_ids if the request asked for them, else None."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_tokens: int = 0

    def extend(self, delta: Delta, choice: Choice) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, choice.stop_reason, choice.error
        self.num_tokens = choice.num_tokens


@dataclass(slots=True)
class RequestOutput:
    """One prompt with its finished choices. prompt_logprobs is parallel to prompt_token_ids, None for the first, if the request
    asked for them and did not fail while the prompt was read; else None."""

    prompt_token_ids: list[int]
    choices: list[CompletionOutput]
    prompt_logprobs: list[PromptTokenLogprobs | None] | None = None


class LLM:
    """A model in this process. `LLM()` is the demo model; keywords are the fields of `EngineConfig`.

    Raises CheckpointError, NativeLibraryError or ConfigError if the model cannot be loaded as asked. Not thread-safe.
    """

    def __init__(self, model: str = DEMO_MODEL, **settings: Any) -> None:
        self.config = EngineConfig(model=model, **settings)
        self.profile = self.config.load_profile()
        self._core: EngineCore = build_core(self.config)
        self.tokenizer = WorldTokenizer(self._core.runner.vocab_size)
        self._stream_ids = itertools.count(1)
        self._choices: dict[int, Choice] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
        n: int = 1,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers to prompts (texts or lists of token ids), in their order; an empty text starts from end of text.

        params: one for all prompts, or one each. n: choices a prompt. progress: a bar on standard error.
        Raises InvalidRequestError before anything runs if a prompt or parameter is impossible.
        """
        all_ids = [self.encode(prompt) for prompt in _as_list(prompts)]
        all_params = self._params_of(all_ids, params, n)
        outputs = [RequestOutput(ids, []) for ids in all_ids]
        with Progress(
            TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(), console=Console(stderr=True), disable=not progress, transient=True,
        ) as bar:  # fmt: skip
            task = bar.add_task("", total=len(all_ids) * n, rate=0.0)
            owners: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
            for output, choice_params in zip(outputs, all_params, strict=True):
                for choice in self.submit(output.prompt_token_ids, choice_params, stop=stop, n=n):
                    output.choices.append(CompletionOutput(choice.index))
                    owners[choice.stream_id] = output, output.choices[-1]
            num_tokens = 0
            for choice, delta in self.run():
                output, completion = owners[choice.stream_id]
                completion.extend(delta, choice)
                if output.prompt_logprobs is None and choice.prompt_logprobs is not None and choice.has_read_prompt:
                    output.prompt_logprobs = list(choice.prompt_logprobs)
                num_tokens += len(delta.token_ids)
                elapsed = bar.tasks[0].elapsed or 1e-9
                bar.update(task, advance=int(delta.finish_reason is not None), rate=num_tokens / elapsed)
        return outputs

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Generator[str, None, None]:
        """Yields the answer to one prompt piece by piece. Closing the iterator ends the request."""
        (choice,) = self.submit(self.encode(prompt), params or SamplingParams(), stop=stop)
        try:
            for _, delta in self.run():
                if delta.text:
                    yield delta.text
        finally:
            self.abort([choice])

    def encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) or [END_OF_TEXT_ID]
        return list(prompt)

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, stop: Sequence[str] = (), include_stop: bool = False, n: int = 1
    ) -> list[Choice]:
        """Queues n choices of one prompt; they fill while `run` is iterated. Raises InvalidRequestError."""
        self._check(prompt, params, n)
        stream_ids = tuple(itertools.islice(self._stream_ids, n))
        prompt_logprobs = PromptLogprobs() if params.prompt_logprobs is not None else None
        choices = [
            Choice(
                index, stream_id, self.tokenizer, stop=stop, include_stop=include_stop, min_tokens=params.min_tokens,
                wants_logprobs=params.logprobs is not None, prompt_logprobs=prompt_logprobs, abort=self._abort_stream,
            )
            for index, stream_id in enumerate(stream_ids)
        ]  # fmt: skip
        self._core.add(AddRequest(stream_ids, pack_ids(prompt), params))
        self._choices.update(zip(stream_ids, choices, strict=True))
        return choices

    def run(self) -> Iterator[tuple[Choice, Delta]]:
        """Steps until nothing is left to do, yielding what each choice gained. More may be submitted meanwhile."""
        while self._core.has_work:
            for choice in self._deliver(self._core.step()):
                delta = choice.take()
                if delta is not None:
                    yield choice, delta

    def abort(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            self._abort_stream(choice.stream_id)

    def _abort_stream(self, stream_id: int) -> None:
        if self._choices.pop(stream_id, None) is not None:
            self._core.abort(AbortRequest((stream_id,)))

    def _deliver(self, output: StepOutput) -> list[Choice]:
        touched: dict[int, Choice] = {}
        deliver_scores(output.scores, self._choices)
        columns = zip(unpack_ids(output.stream_ids), unpack_ids(output.token_ids), strict=True)
        for place, (stream_id, token_id) in enumerate(columns):
            choice = self._choices.get(stream_id)
            if choice is not None:
                choice.push(token_id, output.logprobs.get(place))
                touched[stream_id] = choice
        for finish in output.finished:
            choice = self._choices.pop(finish.stream_id, None)
            if choice is not None:
                choice.end(finish)
                touched[finish.stream_id] = choice
        return list(touched.values())

    def _check(self, prompt: Sequence[int], params: SamplingParams, n: int) -> None:
        if not 1 <= n <= self.config.max_num_seqs:
            raise InvalidRequestError(f"n must be from 1 to {self.config.max_num_seqs}, this engine's slots, but is {n}.", "n")
        params.check_vocabulary(self.tokenizer.vocab_size)
        check_prompt(prompt, self.tokenizer, self.config.max_prompt_tokens)

    def _params_of(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None, n: int
    ) -> list[SamplingParams]:
        each = (
            [params or SamplingParams()] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        )
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"params must be one, or one a prompt ({len(prompts)}), but there are {len(each)}.", "params"
            )
        for prompt, choice_params in zip(prompts, each, strict=True):
            self._check(prompt, choice_params, n)
        return each


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    others = [item for item in prompts if not isinstance(item, int)]
    if ids and others:
        raise InvalidRequestError("prompts must be texts or lists of token ids, but bare ids stand among them.", "prompts")
    return [ids] if ids else others
