"""The real server on a core of its own, with the fake engine on another in the engine's place. Started by `bench.front`."""

import argparse
import sys

import uvloop

from albatross.config import EngineConfig, ServerConfig
from albatross.engine.client import EngineClient
from albatross_server.app import create_app
from albatross_server.logs import configure_logging
from albatross_server.run import make_server, open_listener
from bench.load import HOST
from bench.timing import pin_to_core

SERVER_CORE, OTHERS_CORE = 0, 1


async def serve(engine_config: EngineConfig, config: ServerConfig, engine_command: list[str]) -> None:
    engine = await EngineClient.start(engine_config, engine_command)
    try:
        await make_server(create_app(config, engine_config, engine)).serve(sockets=[open_listener(config)])
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="tokens a second that the engine offers")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    pin_to_core(SERVER_CORE)
    configure_logging("warning", "console")
    step_ms = 1e3 * arguments.streams / arguments.rate
    command = [
        sys.executable, "-m", "bench.fake_engine",
        "--streams", str(arguments.streams), "--step-ms", str(step_ms), "--core", str(OTHERS_CORE),
    ]  # fmt: skip
    config = EngineConfig(max_num_seqs=arguments.streams, max_num_batched_tokens=max(1024, arguments.streams))
    coroutine = serve(config, ServerConfig(host=HOST, port=arguments.port), command)
    uvloop.run(coroutine)


if __name__ == "__main__":
    main()
