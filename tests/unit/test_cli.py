"""The command line: flags from the schema, exit codes, one sentence for a mistake, and help that needs no torch."""

import json
import os
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from albatross import __version__
from albatross.cli import chat as chat_module
from albatross.cli import generate as generate_module
from albatross.cli.main import app, main
from albatross.cli.options import SAMPLING_HELP, SamplingFlags, flag, option_name
from albatross.cli.serve import curl_line
from albatross.config import EngineConfig, ServerConfig
from albatross.errors import CheckpointError, InvalidRequestError
from albatross.sampling_params import SamplingParams

COMMANDS = ["serve", "generate", "chat", "batch", "synth", "doctor"]
Served = list[tuple[EngineConfig, ServerConfig]]
RunMain = Callable[..., int]


class FakeLLM:
    """Answers every prompt with the pieces it was made with, and remembers what it was asked."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.asked: list[tuple[str, SamplingParams, tuple[str, ...]]] = []
        self.num_closed = 0

    def stream(self, prompt: str, params: SamplingParams, *, stop: tuple[str, ...] = ()) -> Iterator[str]:
        self.asked.append((prompt, params, tuple(stop)))
        try:
            yield from self.pieces
        finally:
            self.num_closed += 1


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch) -> RunMain:
    """Runs the command line in this process and returns its exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["albatross", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0)

    return run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """What `serve` would have started."""
    calls: Served = []
    fake = types.ModuleType("albatross_server.run")
    fake.serve = lambda engine, server, on_ready: calls.append((engine, server))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "albatross_server.run", fake)
    return calls


def fail_to_serve(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def serve(*arguments: object) -> None:
        raise error

    fake = types.ModuleType("albatross_server.run")
    fake.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "albatross_server.run", fake)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_and_version_need_no_torch(arguments: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'albatross'; from albatross.cli.main import main; main()"
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "albatross" in result.stdout


def test_serve_has_a_flag_for_every_setting() -> None:
    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", "--help"]).output
    fields = {**EngineConfig.model_fields, **ServerConfig.model_fields}
    del fields["model"]  # which is an argument
    assert [name for name, field in fields.items() if flag(option_name(name, field.default)) not in text] == []


def test_flag_names_stay_whole_in_a_narrow_terminal() -> None:
    text = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["serve", "--help"]).output
    assert "--max-num-batched-tokens" in text


def test_the_described_sampling_flags_are_fields_of_sampling_params() -> None:
    assert set(SAMPLING_HELP) <= set(SamplingParams.__struct_fields__)


def test_flags_and_the_model_argument_become_settings(run_main: RunMain, served: Served) -> None:
    assert run_main("serve", "some.pth", "--port", "9000", "--max-num-seqs", "8", "--dtype", "float16", "--uds", "a.sock") == 0
    engine, server = served[0]
    assert (engine.model, engine.max_num_seqs, engine.dtype) == ("some.pth", 8, "float16")
    assert (server.port, server.uds) == (9000, "a.sock")


def test_a_flag_that_is_not_given_leaves_the_environment_its_place(
    run_main: RunMain, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALBATROSS_PORT", "9001")
    monkeypatch.setenv("ALBATROSS_MODEL", "other.pth")
    run_main("serve", "--host", "0.0.0.0")
    engine, server = served[0]
    assert (engine.model, server.port, server.host) == ("other.pth", 9001, "0.0.0.0")


def test_a_given_flag_wins_over_the_environment(run_main: RunMain, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBATROSS_PORT", "9001")
    run_main("serve", "--port", "9002")
    assert served[0][1].port == 9002


def test_what_is_on_by_default_has_a_flag_to_switch_it_off(
    run_main: RunMain, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALBATROSS_AUTOTUNE", "1")
    assert run_main("serve", "--no-autotune") == 0
    assert (served[0][0].cuda_graphs, served[0][0].autotune) == (True, False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "70000"],
        ["serve", "--max-num-seqs", "0"],
        ["serve", "--dtype", "int3"],
        ["serve", "--no-such-flag"],
        ["no-such-command"],
        ["batch", "only-one.jsonl"],
    ],
)
def test_wrong_usage_leaves_with_2(run_main: RunMain, arguments: list[str]) -> None:
    assert run_main(*arguments) == 2


def test_our_errors_are_one_sentence_and_exit_code_1(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_to_serve(monkeypatch, CheckpointError("model.pth is a web page [html], not a checkpoint."))
    assert run_main("serve") == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "Error: model.pth is a web page [html], not a checkpoint.\n")


def test_a_setting_out_of_range_names_itself(run_main: RunMain, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("serve", "--device", "tpu") == 1
    assert "device" in capsys.readouterr().err
    assert not served


def test_an_interrupt_leaves_with_130(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_serve(monkeypatch, KeyboardInterrupt())
    assert run_main("serve") == 130


@pytest.mark.parametrize(
    ("address", "start"),
    [
        ("http://127.0.0.1:8000", "curl http://127.0.0.1:8000/v1/chat/completions "),
        ("http://0.0.0.0:80", "curl http://127.0.0.1:80/v1/chat/completions "),
        ("http://[::]:80", "curl http://[::1]:80/v1/chat/completions "),
        ("unix:/run/a b.sock", "curl --unix-socket '/run/a b.sock' http://localhost/v1/chat/completions "),
    ],
)
def test_the_line_to_try_reaches_the_address(address: str, start: str) -> None:
    line = curl_line(address)
    assert line.startswith(start)
    body = shlex.split(line)[-1]
    assert json.loads(body)["messages"][0]["role"] == "user"


def test_generate_writes_the_text_alone(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM(" two", " words")
    monkeypatch.setattr(generate_module, "load_llm", lambda engine: llm)
    assert run_main("generate", "Say:", "--temperature", "0", "--stop", "x", "--stop", "y") == 0
    assert capsys.readouterr().out == " two words\n"
    assert llm.asked == [("Say:", SamplingParams(temperature=0), ("x", "y"))]


def test_generate_in_chat_form_uses_the_template_and_the_profile(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM(" June")
    monkeypatch.setattr(generate_module, "load_llm", lambda engine: llm)
    run_main("generate", "--chat", "Which month?", "--top-p", "0.25")
    prompt, params, stop = llm.asked[0]
    profile = EngineConfig().load_profile()
    assert prompt == "User: Which month?\n\nAssistant:"
    assert params == SamplingFlags({"top_p": 0.25}).over(dict(profile.chat_sampling))
    assert (params.top_p, params.temperature) == (0.25, profile.chat_sampling["temperature"])
    assert stop == profile.chat_stop
    assert capsys.readouterr().out == "June\n"


def test_a_profile_with_unknown_sampling_fields_is_one_sentence(
    run_main: RunMain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.json").write_text('{"chat_sampling": {"warmth": 1.0}}')
    assert run_main("chat", "--model", str(tmp_path / "model.pth")) == 1
    assert "warmth" in capsys.readouterr().err


def test_a_prompt_on_standard_input_loses_only_its_last_line_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped_prompt(monkeypatch, b"a\n\nb\n") == "a\n\nb"


def test_a_prompt_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        piped_prompt(monkeypatch, b"\xff")


def piped_prompt(monkeypatch: pytest.MonkeyPatch, text: bytes) -> str:
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        return generate_module.read_standard_input()


def test_doctor_prints_json_for_programs(run_main: RunMain, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["albatross"] == __version__


def test_the_package_run_as_a_module_reports_even_without_a_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "albatross"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "no GPU" in result.stdout


def test_synth_names_every_size_in_its_help() -> None:
    from albatross.models.synth import SIZES

    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["synth", "--help"]).output
    assert [size for size in SIZES if size not in text] == []


def test_chat_carries_the_conversation_and_forgets_it_on_reset() -> None:
    llm = FakeLLM(" an", "swer\n")
    conversation = chat_module.Conversation(llm, SamplingParams(), ("\n\nUser:",), "Be brief.")  # type: ignore[arg-type]
    assert "".join(conversation.ask("one")) == "answer\n"
    list(conversation.ask("two"))
    conversation.reset()
    list(conversation.ask("three"))
    assert [prompt for prompt, _, _ in llm.asked] == [
        "System: Be brief.\n\nUser: one\n\nAssistant:",
        "System: Be brief.\n\nUser: one\n\nAssistant: answer\n\nUser: two\n\nAssistant:",
        "System: Be brief.\n\nUser: three\n\nAssistant:",
    ]


def test_an_answer_that_is_stopped_ends_its_request_and_stays_in_the_conversation() -> None:
    llm = FakeLLM(" one", " two", " three")
    conversation = chat_module.Conversation(llm, SamplingParams(), (), None)  # type: ignore[arg-type]
    answer = conversation.ask("count")
    next(answer)
    answer.close()
    assert llm.num_closed == 1
    list(conversation.ask("go on"))
    assert llm.asked[1][0] == "User: count\n\nAssistant: one\n\nUser: go on\n\nAssistant:"
