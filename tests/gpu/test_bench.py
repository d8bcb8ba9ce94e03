"""The benchmarks of prompts on a CUDA card, with the demo model: graphs of readings, made, timed and told by kernel."""

import pytest
import torch

from albatross.config import EngineConfig
from albatross.engine.model_runner import ModelRunner
from albatross.engine.process import build_core
from bench import interference, prefill, tmix
from bench.cuda import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.timeout(600),
]


def test_a_graph_of_a_reading_in_pieces_gives_the_logits_of_one_pass() -> None:
    runner = ModelRunner(EngineConfig(device="cuda", max_num_seqs=3, cuda_graphs=False))
    tokens = torch.randint(1, runner.vocab_size, (3, 100), device="cuda")
    whole = prefill.PromptReader(runner, tokens, 100).read()
    found = []
    reader = prefill.PromptReader(runner, tokens, 48)
    graph = capture([lambda: found.append(reader.read())])
    runner.pool.zero(range(3))
    graph.replay()
    torch.testing.assert_close(found[-1], whole, rtol=0.02, atol=0.02 * float(whole.abs().max()))


def test_prompts_are_measured_beside_their_bounds_and_by_kernel() -> None:
    arguments = ["--models", "demo", "--shapes", "1x64", "2x32", "1x5000", "--repeats", "2", "--profile", "2x32"]
    results = {result.name: result for result in prefill.measure(prefill.parse([*arguments, "--device", "cuda"]))}
    for shape in ("1x64", "2x32", "1x5000"):
        result = results[f"prefill demo, {shape}, float16 state"]
        assert result.bound is not None
        assert 0 < result.value < result.bound
        assert results[f"scan, 4 heads, {shape}, fp16 state"].value > 0
    profile = "prefill demo, 2x32, float16 state: all"
    assert results[f"{profile} products"].unit == "TFLOP/s"
    assert results[f"{profile} recurrence"].unit == "GB/s"
    assert sum(result.details["share"] for name, result in results.items() if name.startswith(profile)) == pytest.approx(1)


def test_prompts_beside_streams_are_measured() -> None:
    core = build_core(EngineConfig(device="cuda", max_num_seqs=16))
    arguments = ["--streams", "8", "--prompt-tokens", "5000", "--every-ms", "5", "--arrivals", "4", "--steps", "16"]
    results = interference.measure(core, interference.parse(arguments))
    assert all(result.value > 0 for result in results)


def test_many_rows_between_the_products_are_those_of_one_prompt() -> None:
    names = [result.name for result in tmix.bench(tmix.DECODE_ROWS + 1, 256, 1e12)]
    assert f"add_norm_mix, 6 mixes, {tmix.DECODE_ROWS + 1} x 256" in names
    assert not any(name.startswith("tmix_decode") for name in names)
