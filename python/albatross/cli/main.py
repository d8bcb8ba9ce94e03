"""The `albatross` command: declares the subcommands and turns our errors into one sentence and an exit code.

Imports no torch and starts nothing; each subcommand loads what it needs when it runs. Exit codes: 0 done, 1 an error
that one of our classes names, 2 wrong usage, 130 interrupted.
"""

import json
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
MANIFEST_HELP = "Show the manifest of the native library and the wheels, check files against it, or list what it covers."
manifest = typer.Typer(no_args_is_help=True, help=MANIFEST_HELP)
app.add_typer(manifest, name="manifest")
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


@app.command("build")
def build_library(
    arch: Annotated[
        str, typer.Option("--arch", metavar="LIST", help="native (the cards of this machine), all, or a list as 80,86,89,90+PTX.")
    ] = "native",
    jit: Annotated[bool, typer.Option("--jit", help="Build into the cache, where ALBATROSS_JIT=1 lets the loader look.")] = False,
    ptxas: Annotated[bool, typer.Option("--ptxas", help="Show registers, spills and shared memory of every kernel.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="With symbols, and without optimisation on the card.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=0, help="Compilers to run at once; 0: one a core.")] = 0,
) -> None:
    """Compile the native library, in a checkout or from the sources that a wheel brought."""
    from albatross.cli.build import build

    build(arch, is_jit=jit, shows_kernels=ptxas, is_debug=debug, jobs=jobs)


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


AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


@manifest.command("show")
def manifest_show(as_json: AsJson = False) -> None:
    """Show the installed native library and, in a checkout, the finished wheels."""
    from albatross.cli.manifest import read_manifests, show

    manifests = read_manifests()
    if as_json:
        typer.echo(json.dumps({"installed": manifests.record, "manifest": manifests.wheels}, indent=2))
    else:
        from rich.console import Console

        show(manifests, Console())


@manifest.command("verify")
def manifest_verify() -> None:
    """Check the installed files and, in a checkout, the wheels in dist/ against their digests."""
    from albatross.cli.manifest import read_manifests, verify

    findings = list(verify(read_manifests()))
    for subject, problem in findings:
        typer.echo(f"{subject}: {problem or 'good'}")
    if any(problem for _, problem in findings):
        raise typer.Exit(1)


@manifest.command("expand")
def manifest_expand(
    torch: Annotated[str | None, typer.Option(help="Only this minor version, as in 2.11.")] = None,
    cuda: Annotated[str | None, typer.Option(help="Only this CUDA version of torch, as in 13.0.")] = None,
    python: Annotated[str | None, typer.Option(help="Only this Python, as in cp312; none: wheels for any.")] = None,
    platform: Annotated[str | None, typer.Option(help="Only this platform, as in linux_x86_64.")] = None,
    arch: Annotated[str | None, typer.Option(help="Only this card, as in sm_90.")] = None,
    as_json: AsJson = False,
) -> None:
    """List every (name, torch, CUDA, Python ABI, platform, architecture) with its wheel, or why there is none."""
    from albatross.cli.manifest import expand, line_of, matching, read_manifests

    wanted = {"torch": torch, "cuda": cuda, "python_abi": python, "platform": platform, "arch": arch}
    rows = matching(expand(read_manifests()), wanted)
    if as_json:
        typer.echo(json.dumps(list(rows), indent=1))
    else:
        for row in rows:
            typer.echo(line_of(row))
