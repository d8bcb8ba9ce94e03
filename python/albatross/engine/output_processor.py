"""From drawn ids to text: whole characters, stop strings, counts. One `Choice` a stream; knows no sockets and no HTTP.

The engine's ids are pushed in, the reader takes all that gathered since it last looked. A stop string is found here,
token by token, so that text, usage and finish reason do not depend on how the tokens came in; then the engine is asked to
stop the stream. Called by `worker` (asyncio) and by `LLM` (offline).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from albatross.engine.messages import Finish, FinishReason, PromptScores, TokenLogprobs
from albatross.engine.prompt_logprobs import PromptLogprobs
from albatross.tokenizer.incremental import IncrementalDecoder
from albatross.tokenizer.stops import StopMatcher
from albatross.tokenizer.world import WorldTokenizer


class Delta(NamedTuple):
    """What came since the last look. `token_ids` and `logprobs` (if asked for) are parallel; text held back for a possible
    stop string comes in a later delta."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None


class Choice:
    """One choice of one prompt, as its reader sees it."""

    __slots__ = (
        "_abort", "_decoder", "_end", "_logprobs", "_matcher", "_min_tokens", "_pending",
        "error", "finish_reason", "index", "is_lost", "num_tokens", "prompt_logprobs", "stop_reason", "stream_id", "wake",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        stream_id: int,
        tokenizer: WorldTokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        wants_logprobs: bool = False,
        prompt_logprobs: PromptLogprobs | None = None,
        wake: Callable[[], None] = lambda: None,
        abort: Callable[[int], None] = lambda stream_id: None,
    ) -> None:
        """`wake` is called after a push or the end, `abort` with the stream's id when a stop string matched.

        prompt_logprobs: if the request asks for them, where its prompt's go, which are the same for all its choices.
        """
        self.index = index
        self.stream_id = stream_id
        self.prompt_logprobs = prompt_logprobs
        self.wake = wake
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.is_lost = False  # with its engine: nothing is wrong with the request, which may be sent again
        self._abort = abort
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stop, include_stop) if stop else None
        self._min_tokens = min_tokens
        self._pending: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = [] if wants_logprobs else None
        self._end: Finish | None = None

    @property
    def has_read_prompt(self) -> bool:
        """Whether the prompt was read to its end, so that `prompt_logprobs` are whole; at the latest when there is text."""
        is_over = self._end is not None and self._end.reason in ("stop", "length")
        return is_over or bool(self._pending) or self.num_tokens > 0

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        self._pending.append(token_id)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)

    def end(self, finish: Finish, *, is_lost: bool = False) -> None:
        """No more tokens come. The first end counts."""
        if self._end is None:
            self._end, self.is_lost = finish, is_lost

    def take(self) -> Delta | None:
        """All that is new, or None. After a delta with a finish reason there is nothing more."""
        if self.finish_reason is not None or not (self._pending or self._end):
            return None
        token_ids, self._pending = self._pending, []
        if self._matcher is None:
            text = self._decode(token_ids)
        else:
            text, token_ids = self._decode_until_stop(self._matcher, token_ids)
        logprobs = None
        if self._logprobs is not None:
            logprobs, self._logprobs = self._logprobs[: len(token_ids)], []
        if self.finish_reason is None and self._end is not None:
            text += self._close(self._end)
        return Delta(text, token_ids, logprobs, self.finish_reason)

    def _decode(self, token_ids: list[int]) -> str:
        self.num_tokens += len(token_ids)
        return self._decoder.feed(self._text_ids(token_ids))

    def _decode_until_stop(self, matcher: StopMatcher, token_ids: list[int]) -> tuple[str, list[int]]:
        """Text up to a stop string, and the ids up to the one that completed it."""
        parts = []
        num_text_ids = len(self._text_ids(token_ids))
        for place, token_id in enumerate(token_ids):
            self.num_tokens += 1
            text = self._decoder.feed((token_id,)) if place < num_text_ids else ""
            if self.num_tokens <= self._min_tokens:
                parts.append(text)
                continue
            emitted, matched = matcher.feed(text)
            parts.append(emitted)
            if matched is not None:
                self.finish_reason, self.stop_reason = "stop", matched
                if self._end is None:
                    self._abort(self.stream_id)
                return "".join(parts), token_ids[: place + 1]
        return "".join(parts), token_ids

    def _text_ids(self, token_ids: list[int]) -> list[int]:
        """Without the id that ended the stream: it is counted, but is no text."""
        if self._end is not None and self._end.stop_token_id is not None:
            return token_ids[:-1]
        return token_ids

    def _close(self, finish: Finish) -> str:
        """Ends the choice for the engine's reason; returns the text that was held back."""
        self.stop_reason, self.error = finish.stop_token_id, finish.error
        text = self._decoder.flush()
        if self._matcher is not None:
            text, matched = self._matcher.feed(text)
            if matched is None:
                text += self._matcher.flush()
            else:
                self.finish_reason, self.stop_reason = "stop", matched
                return text
        self.finish_reason = finish.reason
        return text


def deliver_scores(scores: Iterable[PromptScores], choices: Mapping[int, Choice]) -> None:
    """Hands each piece to its prompt, by way of any choice that is still among `choices`, which are by stream. Must come before
    the tokens and ends of the same message."""
    for piece in scores:
        choice = next((choices[stream_id] for stream_id in piece.stream_ids if stream_id in choices), None)
        if choice is not None and choice.prompt_logprobs is not None:
            choice.prompt_logprobs.extend(piece.columns)
