"""The `albatross` command: declares the subcommands and turns our errors into one sentence and an exit code.

Imports no torch and starts nothing; each subcommand loads what it needs when it runs. Exit codes: 0 done, 1 an error
that one of our classes names, 2 wrong usage, 130 interrupted.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from albatross import __version__
from albatross.cli.options import SamplingFlags, with_flags
from albatross.config import EngineConfig, ServerConfig
from albatross.errors import AlbatrossError

app = typer.Typer(
    name="albatross", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
VARIABLES = "Each Engine and Server option can be set in the environment too: --max-num-seqs as ALBATROSS_MAX_NUM_SEQS."
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End the answer before this text. May be given several times.")]


def main() -> None:
    """Runs the command line and leaves with its exit code."""
    try:
        app()
    except AlbatrossError as error:
        from albatross.cli.terminal import print_error

        print_error(str(error))
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"albatross {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """RWKV-7 language models: an OpenAI-compatible server, offline generation and a terminal chat."""


@app.command(epilog=VARIABLES)
@with_flags(positional=("model",))
def serve(engine: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over HTTP by OpenAI's API."""
    from albatross.cli.serve import serve as run

    run(engine, server)


@app.command(epilog=VARIABLES)
@with_flags()
def generate(
    engine: EngineConfig,
    sampling: SamplingFlags,
    prompt: Annotated[str | None, typer.Argument(help="Text to go on from; standard input if absent or '-'.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Take the prompt as a user's message and answer it.")] = False,
    stop: Stop = None,
) -> None:
    """Write the continuation of one prompt to standard output."""
    from albatross.cli.generate import generate as run

    run(engine, sampling, prompt, is_chat=chat, stop=stop or [])


@app.command(epilog=VARIABLES)
@with_flags()
def chat(
    engine: EngineConfig,
    sampling: SamplingFlags,
    system: Annotated[str | None, typer.Option("--system", help="Text that opens the conversation.")] = None,
) -> None:
    """Talk to a model in the terminal."""
    from albatross.cli.chat import chat as run

    run(engine, sampling, system)


@app.command(epilog=VARIABLES)
@with_flags()
def batch(
    engine: EngineConfig,
    input_file: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="Requests, one JSON object a line.")],
    output_file: Annotated[Path, typer.Argument(metavar="OUT.JSONL", help="Results; lines already there are not done again.")],
) -> None:
    """Answer a file of requests in OpenAI's batch format; goes on where it stopped."""
    from albatross.cli.batch import run_batch

    run_batch(engine, input_file, output_file)


@app.command()
def synth(
    size: Annotated[str, typer.Argument(help="0.1b, 0.4b, 1.5b, 2.9b, 7.2b or 13.3b.")],
    out: Annotated[Path, typer.Argument(help="The .pth file to write.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a random checkpoint of a real model's shape, for benchmarks."""
    from albatross.cli.synth import synth as run

    run(size, out, seed)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Report the machine, the native library and what to mend."""
    from albatross.cli.doctor import collect_report, render_report

    report = collect_report()
    if as_json:
        import orjson

        typer.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
    else:
        render_report(report)
