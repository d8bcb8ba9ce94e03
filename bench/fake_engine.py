"""An engine process without a model: speaks the messages of `albatross.engine`, and makes one token a stream at a fixed pace.

Takes the engine's place in the front's benchmark, so that it never limits what is measured. It begins to step when all
expected streams have come, and paces the steps by the clock: a step that could not be sent in time is made up for.
"""

import argparse
import contextlib
import json
import sys
import time

import msgspec
import zmq

from albatross.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    EngineStats,
    Envelope,
    Finish,
    FromEngine,
    Heartbeat,
    Shutdown,
    StepOutput,
    ToEngine,
    pack_ids,
)
from albatross.tokenizer import WorldTokenizer
from bench.timing import pin_to_core

_HEARTBEAT_MS = 1000
_SAMPLE = "A goose flew over the lake, and 3 children waved: Bye! Привет, мир. 今天是美好的一天。 안녕하세요 🎉 And so on.\n"


class FakeEngine:
    """Streams by id with the tokens they still get."""

    def __init__(self, num_expected: int, step_s: float) -> None:
        self._num_expected = num_expected
        self._step_s = step_s
        self._left: dict[int, int] = {}
        self._sample_ids = WorldTokenizer().encode(_SAMPLE)
        self._num_steps = 0
        self._begun_at = 0.0
        self.is_stepping = False

    def ready(self) -> EngineReady:
        return EngineReady("fake", WorldTokenizer().vocab_size, 0, 0, "cpu", "float32", "float32", "reference", 0, 0, 0.0)

    def take(self, message: AddRequest | AbortRequest) -> None:
        for stream_id in message.stream_ids:
            if isinstance(message, AddRequest):
                self._left[stream_id] = message.params.max_tokens or 1
            else:
                self._left.pop(stream_id, None)
        if not self.is_stepping and len(self._left) >= self._num_expected:
            self.is_stepping, self._num_steps, self._begun_at = True, 0, time.monotonic()

    def until_step_ms(self) -> int:
        """How long to wait for messages before the next step is due."""
        if not self.is_stepping:
            return _HEARTBEAT_MS
        return max(0, int(1e3 * (self._begun_at + self._num_steps * self._step_s - time.monotonic())))

    def step(self) -> StepOutput:
        while time.monotonic() < self._begun_at + self._num_steps * self._step_s:
            time.sleep(0.0002)
        stream_ids = tuple(self._left)
        phase, size = self._num_steps, len(self._sample_ids)
        token_ids = [self._sample_ids[(phase + row) % size] for row in range(len(stream_ids))]
        finished = []
        for stream_id in stream_ids:
            self._left[stream_id] -= 1
            if not self._left[stream_id]:
                del self._left[stream_id]
                finished.append(Finish(stream_id, "length"))
        self._num_steps += 1
        self.is_stepping = bool(self._left)
        return StepOutput(pack_ids(stream_ids), pack_ids(token_ids), tuple(finished), stats=self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._left), num_steps=self._num_steps)


def serve(engine: FakeEngine, launch: dict[str, str]) -> None:
    """Until told to leave, or until standard input closes because the front is gone."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.connect(launch["receive_from"])
    sender.connect(launch["send_to"])
    encoder = msgspec.msgpack.Encoder()
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    poller = zmq.Poller()
    poller.register(receiver, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)

    def send(message: FromEngine) -> None:
        sender.send(encoder.encode(Envelope(int(launch["epoch"]), message)))

    send(engine.ready())
    while True:
        events = dict(poller.poll(engine.until_step_ms()))
        if sys.stdin.fileno() in events:
            return
        with contextlib.suppress(zmq.Again):
            while True:
                message = decoder.decode(receiver.recv(zmq.NOBLOCK))
                if isinstance(message, Shutdown):
                    return
                engine.take(message)
        send(engine.step() if engine.is_stepping else Heartbeat(engine.stats()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, required=True, help="streams to wait for before the first step")
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--core", type=int, required=True, help="CPU core to run on")
    arguments = parser.parse_args()
    pin_to_core(arguments.core)
    launch = json.loads(sys.stdin.buffer.readline())
    serve(FakeEngine(arguments.streams, arguments.step_ms / 1e3), launch)


if __name__ == "__main__":
    main()
