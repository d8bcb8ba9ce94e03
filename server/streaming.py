"""Writes a generation as server-sent events while it runs. The hot path of the server: every token passes here.

All that has come since the last send goes out in one send, so a reader that lags gets fewer and longer chunks. Each
choice has a role chunk (chat) or one with its prompt (echo), text chunks and a finish chunk; then come the totals, if asked
for, and [DONE].
"""

import asyncio
from typing import Any

from orjson import dumps
from starlette.types import Send

from albatross.engine.client import Choice, Delta, TokenLogprobs
from albatross.tokenizer.chat import AnswerTrimmer
from albatross.tokenizer.world import WorldTokenizer

from .asgi import Headers
from .chunks import DONE, KEEP_ALIVE, ChunkTemplate
from .collecting import FAILED
from .lifecycle import Run
from .logprobs import CompletionLogprobs, chat_logprobs
from .responses import AnswerMeta, make_usage

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
LONG_ECHO = 4096  # tokens of a prompt whose log-probabilities take milliseconds to write, and leave the event loop


class KeepAlive:
    """Wakes the stream's task after a silence, so that proxies and clients see that the connection lives."""

    def __init__(self, run: Run, interval_s: float) -> None:
        self.is_due = False
        self._wake = run.generation.wake
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(interval_s, self._tick)

    def sent(self) -> None:
        self._sent_at = self._loop.time()
        self.is_due = False

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        left_s = self._sent_at + self._interval_s - self._loop.time()
        if left_s <= 0:
            self.is_due = True
            self._wake()
            left_s = self._interval_s
        self._timer = self._loop.call_later(left_s, self._tick)


class ChoiceStream:
    """Turns what is new in one choice into chunks."""

    __slots__ = (
        "_details", "_head", "_prompt", "_tail", "_template", "_tokenizer", "_trimmer",
        "choice", "has_ended", "has_failed", "owes_echo",
    )  # fmt: skip

    def __init__(
        self, run: Run, choice: Choice, template: ChunkTemplate, tokenizer: WorldTokenizer, details: "Details | None"
    ) -> None:
        self.choice = choice
        self.has_ended = False
        self.has_failed = False
        self.owes_echo = run.plan.echo
        self._prompt = run.plan.prompt_of(choice.index)
        self._tokenizer = tokenizer
        self._trimmer = AnswerTrimmer() if run.plan.trim_leading_space else None
        self._template = template
        self._head = template.head(choice.index)
        self._tail = template.tail
        self._details = details

    def write(self, out: list[bytes]) -> bool:
        """Appends the chunks of all that has come since the last call; returns whether the choice has ended."""
        delta = self.choice.take()
        if delta is None:
            return False
        text, _, _, finish_reason = delta
        if text and self._trimmer is not None:
            text = self._trimmer.feed(text)
            self._trimmer = None
        if self._details is not None:
            self._details.write(text, delta, out)
        elif text:
            out += (self._head, dumps(text), self._tail)
        if finish_reason is None:
            return False
        self.has_ended = True
        self.has_failed = finish_reason in FAILED
        if not self.has_failed:
            self._write_finish(out)
        return True

    async def write_echo(self, out: list[bytes]) -> None:
        """Appends the chunk with the prompt, which goes before all others as soon as the prompt has been read."""
        self.owes_echo = False
        text = self._tokenizer.decode(self._prompt)
        if self._details is None:
            out += (self._head, dumps(text), self._tail) if text else ()
        elif len(self._prompt) > LONG_ECHO:
            out.append(await asyncio.to_thread(self._details.echo, text))
        else:
            out.append(self._details.echo(text))

    def _write_finish(self, out: list[bytes]) -> None:
        choice = self.choice
        fields = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        usage = None
        if self._details is not None:
            fields.update(self._details.take())
            usage = self._details.usage()
        out.append(self._template.detailed(choice.index, "", fields, usage))


class Details:
    """The log-probabilities, token ids and running totals of one choice, for requests that want them in each chunk.

    What belongs to tokens without text of their own waits for the next chunk with text, or for the finish chunk.
    """

    def __init__(self, run: Run, choice: Choice, template: ChunkTemplate, tokenizer: WorldTokenizer) -> None:
        self._run = run
        self._choice = choice
        self._template = template
        self._tokenizer = tokenizer
        self._num_top = run.plan.params.logprobs
        self._completion = CompletionLogprobs(tokenizer, self._num_top or 0)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._has_written = False

    def echo(self, text: str) -> bytes:
        """The chunk of the prompt's own text."""
        fields = self.take()
        if self._num_top is not None and self._choice.prompt_logprobs is not None:
            fields["logprobs"] = self._completion.echo(self._run.plan.prompt_of(self._choice.index), self._choice.prompt_logprobs)
        return self._template.detailed(self._choice.index, text, fields, self.usage())

    def write(self, text: str, delta: Delta, out: list[bytes]) -> None:
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or []
        if text:
            out.append(self._template.detailed(self._choice.index, text, self.take(), self.usage()))

    def take(self) -> dict[str, Any]:
        """The fields of the next chunk."""
        plan = self._run.plan
        fields: dict[str, Any] = {}
        if self._num_top is not None and self._token_ids:
            if plan.kind == "chat":
                fields["logprobs"] = chat_logprobs(self._tokenizer, self._token_ids, self._logprobs, self._num_top)
            else:
                fields["logprobs"] = self._completion.render(self._token_ids, self._logprobs)
        if plan.return_token_ids:
            fields["token_ids"] = self._token_ids
            if plan.kind == "completion" and not self._has_written:
                fields["prompt_token_ids"] = plan.prompt_of(self._choice.index)
        self._token_ids, self._logprobs = [], []
        self._has_written = True
        return fields

    def usage(self) -> dict[str, int] | None:
        if not self._run.plan.continuous_usage:
            return None
        return make_usage(self._run.generation.prompt_tokens, self._run.completion_tokens)


async def stream(
    run: Run, meta: AnswerMeta, tokenizer: WorldTokenizer, send: Send, headers: Headers, keep_alive_s: float
) -> None:
    """Sends a whole event stream. Raises what halted the run, or the error of the first choice that failed."""
    await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})
    keep_alive = KeepAlive(run, keep_alive_s)
    try:
        await _send_events(run, ChunkTemplate(run.plan, meta), tokenizer, send, keep_alive)
    finally:
        keep_alive.stop()


async def _send_events(run: Run, template: ChunkTemplate, tokenizer: WorldTokenizer, send: Send, keep_alive: KeepAlive) -> None:
    plan = run.plan
    is_detailed = plan.params.logprobs is not None or plan.return_token_ids or plan.continuous_usage
    live = [
        ChoiceStream(run, choice, template, tokenizer, Details(run, choice, template, tokenizer) if is_detailed else None)
        for choice in run.generation.choices
    ]
    out = _opening(run, template)
    wait = run.generation.wait
    while live:
        if out:
            await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
            keep_alive.sent()
        await wait()
        if run.halt is not None:
            raise run.halt
        out = []
        has_end = False
        for stream in live:
            if stream.owes_echo and stream.choice.has_read_prompt:
                await stream.write_echo(out)
            has_end |= stream.write(out)
        if has_end:
            await _raise_failure(run, live, send, out)
            live = [stream for stream in live if not stream.has_ended]
        if not out and keep_alive.is_due:
            out = [KEEP_ALIVE]
        elif run.first_token_at is None:
            run.mark_first_token()
    if plan.include_usage:
        out.append(template.usage(make_usage(run.generation.prompt_tokens, run.completion_tokens)))
    out.append(DONE)
    await send({"type": "http.response.body", "body": b"".join(out)})


async def _raise_failure(run: Run, live: list[ChoiceStream], send: Send, out: list[bytes]) -> None:
    """If a choice failed, sends what came before and raises its error."""
    for stream in live:
        if stream.has_failed:
            if out:
                await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
            raise run.failure_of(stream.choice)


def _opening(run: Run, template: ChunkTemplate) -> list[bytes]:
    plan = run.plan
    if plan.kind != "chat":
        return []
    extra = {"prompt_token_ids": plan.prompts[0]} if plan.return_token_ids else {}
    return [template.role(choice.index, extra) for choice in run.generation.choices]
