"""The benchmarks of prompts: the readings by the demo model on the CPU, and prompts beside streams on a clock of their own."""

import argparse
from statistics import median

import pytest
import torch
from scripted import ScriptedRunner, peak

from albatross.config import EngineConfig
from albatross.engine.core import EngineCore
from albatross.engine.model_runner import ModelRunner, Pending
from albatross.engine.process import build_core
from albatross.engine.scheduler import Step
from albatross.errors import ConfigError
from bench import chunks, interference, plot, prefill, recurrence
from bench.models import model_config
from bench.prefill import Shape
from bench.vectors import random_products

VOCAB = 300  # holds the ids of a benchmark's prompts
STEP_S, TOKEN_S = 0.010, 0.001  # of a step, and of each of its tokens


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(EngineConfig(device="cpu", max_num_seqs=4, num_threads=1))


def tokens(prompts: int, length: int) -> torch.Tensor:
    return torch.randint(1, 4096, (prompts, length), generator=torch.Generator().manual_seed(1))


def test_a_reading_in_pieces_gives_the_logits_of_one_whole_pass(runner: ModelRunner) -> None:
    found = []
    for piece in (4, 10):
        runner.pool.zero(range(4))
        found.append(prefill.PromptReader(runner, tokens(3, 10), piece).read())
    assert found[0].shape == (3, runner.vocab_size)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_a_reading_goes_on_from_the_states_of_the_one_before(runner: ModelRunner) -> None:
    reader = prefill.PromptReader(runner, tokens(1, 6), 6)
    runner.pool.zero([0])
    first = reader.read()
    assert not torch.allclose(first, reader.read())


def test_the_recurrence_moves_states_once_a_piece(runner: ModelRunner) -> None:
    whole, pieces = (prefill.PromptReader(runner, tokens(2, 8), length) for length in (8, 4))
    states = 2 * 2 * runner.pool.wkv[0].nbytes
    assert pieces.recurrence_bytes - whole.recurrence_bytes == states
    assert pieces.cost == whole.cost


@pytest.mark.parametrize(
    ("shape", "length"),
    [(Shape(1, 4096), 4096), (Shape(8, 512), 512), (Shape(1, 4097), 2048), (Shape(8, 2048), 256), (Shape(5000, 1), 1)],
)
def test_what_is_too_long_for_one_pass_is_cut_by_the_token_budget(shape: Shape, length: int) -> None:
    assert prefill.piece_length(shape, 2048) == length


def test_a_shape_is_read_as_prompts_times_tokens() -> None:
    assert Shape.parse("8x512") == Shape(8, 512)
    assert str(Shape(8, 512)) == "8x512"
    for text in ("8", "8x", "0x4", "8x-1", "8x5x1"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"such as 8x512; found '{text}'"):
            Shape.parse(text)


def measured(*arguments: str) -> dict[str, prefill.Result]:
    shapes = ("--shapes", "1x8", "2x3")
    args = prefill.parse(["--models", "demo", "--device", "cpu", "--repeats", "1", *shapes, *arguments])
    return {result.name: result for result in prefill.measure(args)}


def test_each_shape_is_measured_with_each_kernel_and_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    second = recurrence.Kernel(lambda rows: lambda: calls.append((rows.num_tokens, rows.pool.shape[1])), 7)
    monkeypatch.setattr(prefill, "KERNELS", {"scan": recurrence.KERNELS["scan"], "second": second})
    heads = model_config("demo").num_heads
    results = measured("--state-dtype", "float32")
    kernels = {
        f"{name}, {heads} heads, {shape}, {state} state"
        for name in ("scan", "second") for shape in ("1x8", "2x3") for state in ("fp16", "fp32")
    }  # fmt: skip
    assert set(results) == kernels | {"prefill demo, 1x8, float32 state", "prefill demo, 2x3, float32 state"}
    assert all(result.value > 0 and result.bound is None and result.target is None for result in results.values())
    assert set(calls) == {(8, heads), (6, heads)}
    assert results["prefill demo, 2x3, float32 state"].details["prompts"] == 2


def test_time_mixing_is_the_same_by_scan_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    products = random_products(12, 2, torch.device("cpu"))
    monkeypatch.setattr(recurrence, "random_products", lambda *args: products)
    outs = []
    for name in ("time mixing, scan", "time mixing, chunks"):
        pool, bounds = torch.zeros(2, 2, 64, 64), torch.tensor([0, 5, 12], dtype=torch.int32)
        rows = recurrence.Rows(pool, bounds, torch.tensor([1, 0], dtype=torch.int32), 12)
        recurrence.KERNELS[name].prepare(rows)()
        outs.append(pool)
    assert (outs[0] - outs[1]).norm() < 2e-3 * outs[0].norm()


def test_parts_can_be_measured_by_themselves() -> None:
    assert all(result.unit == "us" for result in measured("--parts", "kernel").values())
    assert all(result.unit == "tokens/s" for result in measured("--parts", "model").values())


def test_a_known_card_sets_bound_and_floor_and_makes_the_figure_a_point_of_the_plot(runner: ModelRunner) -> None:
    rates = prefill.Rates(bandwidth=1e9, gemms=1e9)
    machine = prefill.Machine(runner.device, 1, rates)
    reader = prefill.PromptReader(runner, tokens(1, 64), 64)
    (result,) = prefill.measure_model("demo", reader, machine, prefill.parse(["--device", "cpu"]))
    details = result.details
    assert details["limit"] == "compute"
    assert details["floor_ms"] == details["gemm_ms"] == reader.cost.flops / 1e9 * 1e3
    assert result.ratio == pytest.approx(details["of_gemms"])
    assert plot.is_one_prompt(details)
    kernel = prefill.measure_kernel("scan", 4, Shape(1, 4), "fp16", machine)
    assert kernel.bound == pytest.approx(kernel.details["bytes"] / 1e9 * 1e6)


def test_a_profile_without_a_card_is_refused() -> None:
    with pytest.raises(ConfigError, match="the device is the CPU"):
        measured("--profile")


def duration(step: Step) -> float:
    return STEP_S + TOKEN_S * step.num_tokens


class ClockedRunner(ScriptedRunner):
    """Takes STEP_S a step and TOKEN_S a token, on a clock that else moves a little whenever it is looked at."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(lambda state: peak(1, VOCAB), num_slots, VOCAB)
        self.now = 0.0
        self.read_at: list[float] = []  # when each prompt had been read

    def launch(self, step: Step) -> Pending:
        self.now += duration(step)
        self.read_at += [self.now for chunk in step.chunks if chunk.is_last]
        return super().launch(step)

    def readings(self, num_tokens: int) -> list[list[float]]:
        """Seconds of each step that read a prompt of so many tokens, by prompt."""
        found: dict[int, list[float]] = {}
        for step in self.steps:
            for chunk in step.chunks:
                if len(chunk.request.prompt) == num_tokens:
                    found.setdefault(id(chunk.request), []).append(duration(step))
        return list(found.values())

    def clock(self) -> float:
        self.now += 1e-6
        return self.now


def clocked_core(num_slots: int, budget: int) -> tuple[EngineCore, ClockedRunner]:
    runner = ClockedRunner(num_slots)
    config = EngineConfig(
        device="cpu", max_num_seqs=num_slots, max_num_batched_tokens=budget, max_output_tokens=interference.ENDLESS_TOKENS
    )
    return EngineCore(config, runner), runner


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-4)


def test_undisturbed_streams_have_gaps_of_one_step() -> None:
    core, runner = clocked_core(4, 64)
    streams = interference.Streams(core, runner.clock)
    streams.start(3)
    for _ in range(5):
        streams.step()
    assert streams.take_gaps() == [near(STEP_S + 3 * TOKEN_S)] * 15
    assert streams.take_gaps() == []
    assert streams.time_step(4) == near(STEP_S + 3 * TOKEN_S)


def test_a_prompt_beside_streams_stretches_their_gaps_by_its_tokens() -> None:
    core, runner = clocked_core(4, 23)
    streams = interference.Streams(core, runner.clock)
    streams.start(3)
    num_before = len(runner.steps)
    (seconds,) = streams.read(50)
    steps = [duration(step) for step in runner.steps[num_before:]]
    assert len(steps) > 1
    assert max(steps) > STEP_S + 3 * TOKEN_S
    assert seconds == near(sum(steps))
    assert sorted(streams.take_gaps()) == [near(seconds) for seconds in sorted(steps) for _ in range(3)]


def test_a_prompt_that_arrives_within_a_step_waits_for_its_end() -> None:
    core, runner = clocked_core(4, 64)
    streams = interference.Streams(core, runner.clock)
    streams.start(2)
    begun, step, reading = runner.now, STEP_S + 2 * TOKEN_S, STEP_S + 12 * TOKEN_S
    arrival = reading + 1.5 * step
    first, second = streams.read(10, [0.0, arrival])
    *_, first_at, second_at = runner.read_at
    assert first == near(first_at - begun)
    assert second == near(second_at - begun - arrival)
    assert second > reading


def test_prompts_that_overlap_are_each_timed_from_their_own_arrival() -> None:
    core, runner = clocked_core(4, 16)
    streams = interference.Streams(core, runner.clock)
    seconds = streams.read(32, [0.0, 0.001])
    assert len(seconds) == 2
    assert seconds[0] < seconds[1]
    assert sum(len(chunk.tokens) for step in runner.steps for chunk in step.chunks) == 64


def test_interference_is_held_against_steps_speed_and_time_of_the_undisturbed() -> None:
    core, runner = clocked_core(6, 23)
    args = interference.parse(
        ["--streams", "3", "--prompt-tokens", "100", "--short-tokens", "10", "--every-ms", "50", "--arrivals", "4"]
    )
    results = {result.details["figure"]: result for result in interference.measure(core, args, runner.clock)}
    step = STEP_S + 3 * TOKEN_S
    assert results["undisturbed step"].value == pytest.approx(1e3 * step, rel=1e-3)
    _, *readings = runner.readings(100)  # without the one that warms up
    speeds = [100 / sum(steps) for steps in readings]
    alone, beside = results["prompt of 100 alone"], results["prompt of 100 beside them"]
    assert alone.value == pytest.approx(median(speeds[:3]), rel=1e-3)
    assert beside.value == pytest.approx(median(speeds[3:]), rel=1e-3)
    assert (beside.bound, beside.target) == (alone.value, 0.6 * alone.value)
    gap = results["longest gap beside a prompt of 100"]
    assert (gap.value, gap.bound) == (pytest.approx(max(map(max, readings[3:])) / step, rel=1e-3), 5.0)
    assert results["99 % of gaps beside a prompt of 100"].value <= gap.value
    first = results["first token of prompts of 10, mean"]
    assert 1e3 * (STEP_S + 13 * TOKEN_S) <= first.value <= 1e3 * (2 * STEP_S + 16 * TOKEN_S)
    assert first.bound == 60.0
    assert results["first token of prompts of 10, 99 %"].value >= first.value


def test_interference_runs_on_the_demo_model() -> None:
    core = build_core(EngineConfig(device="cpu", max_num_seqs=4, max_num_batched_tokens=32, num_threads=1))
    args = interference.parse(
        ["--streams", "2", "--prompt-tokens", "40", "--short-tokens", "5", "--every-ms", "5", "--arrivals", "2", "--steps", "3",
         "--repeats", "1"]
    )  # fmt: skip
    results = interference.measure(core, args)
    assert len(results) == 8
    assert all(result.value > 0 and result.name == f"demo, 2 streams: {result.details['figure']}" for result in results)


def test_errors_over_a_prompt_stand_by_way_and_strength_of_decay() -> None:
    results = {result.name: result for result in chunks.measure([1, 20], torch.device("cpu"))}
    assert len(results) == 2 * 3 * 2 * 2
    for result in results.values():
        assert result.details["columns"] == [1, 20]
        assert all(0 < value < 2e-3 for value in result.details["values"])
    by_scan = results["scan, fp32 state, mixed decay: state"].value
    assert by_scan > results["chunks, fp32 state, mixed decay: state"].value  # on the CPU chunks round nothing in between
