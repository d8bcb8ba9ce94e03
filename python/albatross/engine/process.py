"""The engine process: one `EngineCore` between two ZeroMQ sockets, started by `supervisor` with `python -m`.

Its standard input carries one line of JSON (`Launch`) and then stays open: when it closes, the front is gone and this
process leaves. Messages in, one `StepOutput` a step out; a heartbeat while idle. Any failure is said in one
`EngineFailed` before the process ends.
"""

import logging
import signal
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import zmq

from albatross.config import EngineConfig
from albatross.engine.core import EngineCore
from albatross.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    Envelope,
    Finish,
    FromEngine,
    Heartbeat,
    Shutdown,
    StepOutput,
    ToEngine,
)
from albatross.engine.model_runner import resolve_device
from albatross.errors import AlbatrossError, ConfigError
from albatross.tokenizer.world import WorldTokenizer

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 1000
EXIT_FAILED = 70  # sysexits.h EX_SOFTWARE


class Launch(msgspec.Struct, frozen=True):
    """What an engine process is told at birth: the settings, its number among the workers, and the front's sockets."""

    config: dict[str, Any]
    worker: int
    epoch: int
    receive_from: str
    send_to: str


class FrontGoneError(Exception):
    """Standard input closed: nobody is left to work for."""


class Link:
    """The two sockets to the front, and the watch over its life."""

    def __init__(self, launch: Launch) -> None:
        self._epoch = launch.epoch
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._in = context.socket(zmq.PULL)
        self._in.connect(launch.receive_from)
        self._out = context.socket(zmq.PUSH)
        self._out.setsockopt(zmq.SNDTIMEO, HEARTBEAT_MS)
        self._out.setsockopt(zmq.LINGER, HEARTBEAT_MS)
        self._out.connect(launch.send_to)
        self._poller = zmq.Poller()
        self._poller.register(self._in, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)

    def send(self, message: FromEngine) -> None:
        data = self._encoder.encode(Envelope(self._epoch, message))
        while True:
            try:
                self._out.send(data)
                return
            except zmq.Again:  # the front lags by a whole socket buffer: wait for it as long as it lives
                self._check_front(dict(self._poller.poll(0)))

    def receive(self, timeout_ms: int) -> Iterator[ToEngine]:
        """All messages that are there, after waiting at most `timeout_ms` for the first."""
        events = dict(self._poller.poll(timeout_ms))
        self._check_front(events)
        if self._in not in events:
            return
        while True:
            try:
                data = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decoder.decode(data)

    def _check_front(self, events: dict[object, int]) -> None:
        if sys.stdin.fileno() in events and not sys.stdin.buffer.read(1):
            raise FrontGoneError


def config_of_worker(config: EngineConfig, worker: int) -> EngineConfig:
    """The settings of one of `config.workers` engines: on CUDA the card of its number, on the CPU its share of the threads.

    Raises ConfigError if there are more workers than cards.
    """
    if config.workers == 1:
        return config
    own: dict[str, Any] = {"workers": 1, "device": resolve_device(config.device)}
    if own["device"] == "cpu":
        own["num_threads"] = config.num_threads or max(1, torch.get_num_threads() // config.workers)
        return config.model_copy(update=own)
    num_cards = torch.cuda.device_count()
    if config.workers > num_cards:
        cards = f"{num_cards} CUDA card{'' if num_cards == 1 else 's'}"
        raise ConfigError(
            f"workers is {config.workers}, but torch sees {cards}, and each worker needs one; use --workers {num_cards}."
        )
    return config.model_copy(update={**own, "device": f"cuda:{worker}"})


def build_core(config: EngineConfig) -> EngineCore:
    """An engine that never draws an id its vocabulary has no entry for. Raises ConfigError for more than one worker."""
    if config.workers > 1:
        raise ConfigError(
            f"workers is {config.workers}, but an engine in this process is one; use albatross serve or batch for several."
        )
    core = EngineCore(config)
    core.forbid(WorldTokenizer(core.runner.vocab_size).undefined_ids)
    return core


def serve(core: EngineCore, link: Link) -> None:
    """Steps while there is work, waits while there is none, until told to leave."""
    while True:
        for message in link.receive(0 if core.has_work else HEARTBEAT_MS):
            if isinstance(message, Shutdown):
                return
            refused = _take(core, message)
            if refused is not None:
                link.send(refused)
        link.send(core.step() if core.has_work else Heartbeat(core.stats()))


def _take(core: EngineCore, message: ToEngine) -> StepOutput | None:
    """Hands one message to the core; what it refuses ends that request alone."""
    try:
        if isinstance(message, AddRequest):
            core.add(message)
        elif isinstance(message, AbortRequest):
            core.abort(message)
    except (AlbatrossError, ValueError) as error:
        logger.warning("refused a message: %s", error)
        if isinstance(message, AddRequest):
            finished = tuple(Finish(stream_id, "error", error=str(error)) for stream_id in message.stream_ids)
            return StepOutput(b"", b"", finished, stats=core.stats())
    return None


def _open_core(launch: Launch) -> EngineCore:
    config = config_of_worker(EngineConfig(**launch.config), launch.worker)
    device = resolve_device(config.device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # else pinned memory and events would open a context on the first card too
    return build_core(config)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's to answer
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    log_format = f"%(asctime)s %(levelname)s worker {launch.worker} %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=log_format, stream=sys.stderr)
    link = Link(launch)
    try:
        core = _open_core(launch)
        link.send(core.ready())
        serve(core, link)
    except FrontGoneError:
        return 0
    except AlbatrossError as error:
        link.send(EngineFailed(type(error).__name__, str(error)))
        return EXIT_FAILED
    except Exception as error:
        logger.exception("the engine failed")
        link.send(EngineFailed(type(error).__name__, f"the engine failed: {type(error).__name__}: {error}"))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
