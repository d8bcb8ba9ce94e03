"""Follows a generation to its end without streaming and hands back its finished choices."""

from albatross.engine.client import Choice, Delta, TokenLogprobs
from albatross.tokenizer.chat import AnswerTrimmer

from .lifecycle import Run
from .responses import FinishedChoice

FAILED = ("error", "abort")


async def collect(run: Run) -> list[FinishedChoice]:
    """Raises what halted the run, or the error of the first choice that failed."""
    parts = [_Parts(choice, run.plan.trim_leading_space) for choice in run.generation.choices]
    num_open = len(parts)
    while num_open:
        await run.generation.wait()
        if run.halt is not None:
            raise run.halt
        for part in parts:
            delta = part.choice.take()
            if delta is None:
                continue
            if run.first_token_at is None and delta.token_ids:
                run.mark_first_token()
            part.add(delta)
            if delta.finish_reason in FAILED:
                raise run.failure_of(part.choice)
            num_open -= delta.finish_reason is not None
    return [part.finish() for part in parts]


class _Parts:
    """The pieces of one choice so far."""

    def __init__(self, choice: Choice, trims: bool) -> None:
        self.choice = choice
        self._trimmer = AnswerTrimmer() if trims else None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(self._trimmer.feed(delta.text) if self._trimmer else delta.text)
        self._token_ids += delta.token_ids
        if delta.logprobs is not None:
            self._logprobs = (self._logprobs or []) + delta.logprobs

    def finish(self) -> FinishedChoice:
        choice = self.choice
        return FinishedChoice(
            index=choice.index,
            text="".join(self._texts),
            num_tokens=choice.num_tokens,
            finish_reason=str(choice.finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            prompt_logprobs=choice.prompt_logprobs,
        )
