"""`albatross serve`: the HTTP server, and a line to try once it is ready."""

import shlex

from albatross.cli.terminal import notes
from albatross.config import EngineConfig, ServerConfig

EXAMPLE = '{"messages": [{"role": "user", "content": "What is the capital of Ethiopia?"}]}'
EVERYWHERE = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}  # addresses to listen on, and where to find them


def serve(engine: EngineConfig, server: ServerConfig) -> None:
    """Returns after a drain. Raises what keeps the server from starting."""
    from albatross_server.run import serve as run

    run(engine, server, _show_example if server.log_format == "console" else lambda address: None)


def curl_line(address: str) -> str:
    """A shell command that asks the server at `address` ("http://host:port" or "unix:path") a question."""
    if address.startswith("unix:"):
        where = f"--unix-socket {shlex.quote(address.removeprefix('unix:'))} http://localhost"
    else:
        where = address
        for listening, reaching in EVERYWHERE.items():
            where = where.replace(listening, reaching)
    return f"curl {where}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(EXAMPLE)}"


def _show_example(address: str) -> None:
    notes.print(f"\nTry it:\n  {curl_line(address)}\n", markup=False, soft_wrap=True)
