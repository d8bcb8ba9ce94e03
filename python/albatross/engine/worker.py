"""One engine process and the streams in it, as the front knows them: exact at once, whatever the engine has reported.

Tokens are appended to each stream's choice, whose generation is woken once a step. Knows nothing of the other workers;
`client` chooses among them.
"""

import contextlib
from collections.abc import Callable, Sequence

from albatross.config import EngineConfig
from albatross.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    Finish,
    FromEngine,
    StepOutput,
    pack_ids,
    unpack_ids,
)
from albatross.engine.output_processor import Choice, deliver_scores
from albatross.engine.status import WorkerStatus
from albatross.engine.supervisor import Supervisor
from albatross.errors import EngineDeadError
from albatross.sampling_params import SamplingParams


class Worker:
    """`on_ready` is called with each engine that has loaded, `on_end` whenever a stream has ended."""

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        command: Sequence[str],
        on_ready: Callable[[EngineReady], None],
        on_end: Callable[[], None],
    ) -> None:
        self.supervisor = Supervisor(config, self._on_message, self._on_death, command, number)
        self._on_ready = on_ready
        self._on_end = on_end
        self._streams: dict[int, Choice] = {}
        self._unread_tokens: dict[int, int] = {}  # first stream of a prompt -> its length, until its first token comes

    @property
    def status(self) -> WorkerStatus:
        return self.supervisor.status

    @property
    def load(self) -> int | None:
        """Streams that run or wait here; None while there is no engine to take any."""
        return len(self._streams) if self.supervisor.is_ready else None

    @property
    def num_unread_tokens(self) -> int:
        """Tokens of the prompts from which nothing has been drawn yet."""
        return sum(self._unread_tokens.values())

    def add(self, choices: Sequence[Choice], prompt: Sequence[int], params: SamplingParams, priority: int) -> None:
        """Starts the choices of one prompt. Raises EngineDeadError, and has then started nothing."""
        stream_ids = tuple(choice.stream_id for choice in choices)
        self.supervisor.send(AddRequest(stream_ids, pack_ids(prompt), params, priority))
        self._streams.update(zip(stream_ids, choices, strict=True))
        self._unread_tokens[stream_ids[0]] = len(prompt)

    def abort(self, stream_ids: Sequence[int]) -> None:
        """Ends those of the streams that are here, at once and in the engine."""
        running = tuple(stream_id for stream_id in stream_ids if stream_id in self._streams)
        if not running:
            return
        for stream_id in running:
            self._end_stream(Finish(stream_id, "abort"))
        with contextlib.suppress(EngineDeadError):  # an engine that is gone, noticed or not, has nothing left to stop
            self.supervisor.send(AbortRequest(running))

    async def close(self) -> None:
        """Ends every stream with an error, and the process."""
        self._on_death("the server is shutting down")
        await self.supervisor.close()

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, EngineReady):
            self._on_ready(message)
        elif isinstance(message, StepOutput):
            self._on_step(message)

    def _on_step(self, message: StepOutput) -> None:
        streams, unread, logprobs = self._streams, self._unread_tokens, message.logprobs
        touched: list[Choice] = []
        if message.scores:
            deliver_scores(message.scores, streams)
        for place, (stream_id, token_id) in enumerate(
            zip(unpack_ids(message.stream_ids), unpack_ids(message.token_ids), strict=True)
        ):
            choice = streams.get(stream_id)
            if choice is None:
                continue
            choice.push(token_id, logprobs.get(place) if logprobs else None)
            touched.append(choice)
            if unread:
                unread.pop(stream_id, None)
        for finish in message.finished:
            self._end_stream(finish)
        for choice in touched:
            choice.wake()

    def _end_stream(self, finish: Finish, *, is_lost: bool = False) -> None:
        choice = self._streams.pop(finish.stream_id, None)
        self._unread_tokens.pop(finish.stream_id, None)
        if choice is not None:
            self._on_end()
            choice.end(finish, is_lost=is_lost)
            choice.wake()

    def _on_death(self, reason: str) -> None:
        """Every stream in a dead engine ends with an error at once."""
        error = f"The engine was lost while it worked on this request ({reason}); it is being restarted, please try again."
        for stream_id in list(self._streams):
            self._end_stream(Finish(stream_id, "error", error=error), is_lost=True)
