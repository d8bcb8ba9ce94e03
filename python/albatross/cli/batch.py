"""`albatross batch`: answers a file of requests with many in flight, and goes on where an earlier run stopped.

Reads bodies and builds answers by the server's own functions, so a line gets what the HTTP API would answer. The engine
runs in processes of its own; a request lost with a dying one is asked again.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from albatross import __version__
from albatross.cli.batch_file import BatchRequest, check_ids, open_output, read_done, read_requests, write_problem, write_row
from albatross.cli.terminal import load_profile, notes
from albatross.config import EngineConfig
from albatross.engine.client import EngineClient
from albatross.errors import AlbatrossError, EngineDeadError, InvalidRequestError
from albatross_server.collecting import collect
from albatross_server.errors import ApiError, to_api_error
from albatross_server.lifecycle import Run
from albatross_server.plan import Context, Kind, Plan, to_plan
from albatross_server.responses import make_fingerprint, make_meta, whole_answer

MAX_ATTEMPTS = 3  # of one request, when engines die under it
POLL_S = 0.1  # between two looks at an engine that restarts, or a queue that is full
KINDS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}


def run_batch(engine: EngineConfig, input_file: Path, output_file: Path) -> None:
    """Answers every line of `input_file` that has no row in `output_file` yet.

    Raises InvalidRequestError if the files cannot be used as asked, and the errors of an engine that does not start.
    """
    if input_file.resolve() == output_file.resolve():
        raise InvalidRequestError("The output file must be another than the input file.")
    keys = check_ids(input_file)
    done = read_done(output_file) & keys
    with open_output(output_file) as output, _progress() as progress:
        tally = _Tally(progress, len(keys), len(done))
        open_requests = (request for request in read_requests(input_file) if request.key not in done)
        try:
            if len(done) < len(keys):
                asyncio.run(_Batch(engine, output, tally).run(open_requests))
        except KeyboardInterrupt:
            notes.print("Stopped. The same command goes on from here.")
            raise
    counts = f"{tally.num_answered} answered, {tally.num_failed} failed, {len(done)} done before"
    notes.print(f"{counts}; see {output_file}.", markup=False)


class _Tally:
    """Counts what the rows say, and shows it."""

    def __init__(self, progress: Progress, total: int, num_done: int) -> None:
        self.num_answered = self.num_failed = self._num_tokens = 0
        self._progress = progress
        self._task = progress.add_task("", total=total, completed=num_done, rate=0.0)

    def add(self, is_answered: bool, num_tokens: int = 0) -> None:
        self.num_answered += is_answered
        self.num_failed += not is_answered
        self._num_tokens += num_tokens
        elapsed = self._progress.tasks[self._task].elapsed or 1e-9
        self._progress.update(self._task, advance=1, rate=self._num_tokens / elapsed)


class _Batch:
    """One run over the open requests."""

    def __init__(self, config: EngineConfig, output: BinaryIO, tally: _Tally) -> None:
        self._config = config
        self._profile = load_profile(config)
        self._output = output
        self._tally = tally
        self._num_running = 0

    async def run(self, requests: Iterator[BatchRequest]) -> None:
        self._client = await EngineClient.start(self._config)
        try:
            info = await self._client.wait_ready()
            self._fingerprint = make_fingerprint(__version__, info)
            self._context = Context(
                self._client.tokenizer, self._profile, self._config.model_name, self._config.max_num_choices
            )
            await _gather([self._work(requests) for _ in range(2 * self._config.max_num_seqs * self._config.workers)])
        finally:
            await self._client.close()

    async def _work(self, requests: Iterator[BatchRequest]) -> None:
        """One of the tasks that share the iterator; twice as many as slots keep every slot busy."""
        for request in requests:
            if request.problem is not None:
                write_problem(self._output, request)
                self._tally.add(is_answered=False)
                continue
            status, body = await self._answer(request)
            write_row(self._output, request, status, body)
            self._tally.add(status == HTTPStatus.OK, body.get("usage", {}).get("completion_tokens", 0))

    async def _answer(self, request: BatchRequest) -> tuple[int, dict[str, Any]]:
        """Status and body, as the API would give them."""
        try:
            plan = to_plan(KINDS[request.url], request.body, self._context)
        except InvalidRequestError as error:
            return _refusal(to_api_error(error, request.row_id))
        num_attempts = 0
        while True:
            try:
                return HTTPStatus.OK, await self._generate(plan)
            except AlbatrossError as error:
                failure = to_api_error(error, request.row_id)
            num_attempts += failure.status == HTTPStatus.SERVICE_UNAVAILABLE
            if failure.status == HTTPStatus.TOO_MANY_REQUESTS and self._num_running:
                await asyncio.sleep(POLL_S)
            elif failure.status == HTTPStatus.SERVICE_UNAVAILABLE and num_attempts < MAX_ATTEMPTS:
                await self._until_ready()
            else:
                return _refusal(failure)

    async def _generate(self, plan: Plan) -> dict[str, Any]:
        client = self._client
        generation = client.generate(
            plan.prompts, plan.params, n=plan.n, stop=plan.stop, include_stop=plan.include_stop, priority=plan.priority
        )
        self._num_running += 1
        try:
            with generation:
                choices = await collect(Run(plan, generation))
        finally:
            self._num_running -= 1
        meta = make_meta(plan.kind, self._context.model_name, self._fingerprint, plan.request_id)
        return whole_answer(plan, meta, choices, client.tokenizer)

    async def _until_ready(self) -> None:
        """Raises EngineDeadError if no engine comes back in the time one may take to start."""
        deadline = time.monotonic() + self._config.start_timeout_s
        while self._client.status.state != "ready":
            if time.monotonic() > deadline:
                reason = self._client.status.reason
                raise EngineDeadError(f"The engine did not come back: {reason}. The same command goes on from here.")
            await asyncio.sleep(POLL_S)


def _refusal(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, error.as_dict()


async def _gather(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Waits for all; the first failure ends the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _progress() -> Progress:
    return Progress(
        TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=notes,
    )
