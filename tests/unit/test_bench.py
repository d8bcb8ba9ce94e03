"""What benchmarks share: bounds by arithmetic, kernels by name, inputs of many rows, reports in one, and the GPU check."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from albatross.errors import ConfigError
from albatross.models.synth import SIZES
from bench import merge, profile, tmix
from bench.bounds import StepCost, recurrence_bytes, step_cost
from bench.timing import ROOT


def test_the_bound_of_a_large_model_counts_its_weights_once_and_its_states_twice() -> None:
    cost = step_cost(SIZES["7.2b"], 1, slot_bytes=17_301_504)
    assert cost.weight_bytes == pytest.approx(13.86e9, rel=0.01)
    assert cost.state_bytes == 2 * 17_301_504
    assert cost.flops == pytest.approx(cost.weight_bytes, rel=1e-4)  # 2 operations for each number of 2 bytes


def test_only_rows_and_states_grow_with_the_batch() -> None:
    one, many = (step_cost(SIZES["1.5b"], rows, slot_bytes=1000) for rows in (1, 101))
    assert many.weight_bytes - one.weight_bytes == 100 * SIZES["1.5b"].hidden_size * 2
    assert many.state_bytes == 101 * one.state_bytes
    assert many.flops == 101 * one.flops


def test_every_token_of_a_prompt_goes_through_the_layers_and_its_last_one_through_the_head() -> None:
    size = SIZES["1.5b"]
    decode, prompt = step_cost(size, 1, 1000), step_cost(size, 1, 1000, num_tokens=101)
    head = 2 * size.hidden_size * size.vocab_size
    assert prompt.flops - head == 101 * (decode.flops - head)
    assert prompt.state_bytes == decode.state_bytes
    assert prompt.weight_bytes - decode.weight_bytes == 100 * size.hidden_size * 2


def test_a_recurrence_moves_each_state_twice_and_seven_vectors_a_token() -> None:
    assert recurrence_bytes(3, 100, num_heads=2, state_itemsize=4) == 3 * 2 * (2 * 64 * 64 * 4) + 100 * 2 * (7 * 64 * 2)


@pytest.mark.parametrize(("num_rows", "num_sequences"), [(3, 3), (4, 1)])
def test_more_rows_than_a_decode_step_has_are_the_tokens_of_one_prompt(
    num_rows: int, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tmix, "DEVICE", "cpu")
    monkeypatch.setattr(tmix, "DECODE_ROWS", 3)
    inputs = tmix.Inputs(num_rows, 128)
    for make in (lambda: inputs.add_norm_mix(6), inputs.add_norm, inputs.tmix_prepare, inputs.tmix_readout):
        calls, _ = make()
        calls[0]()
    assert inputs.bounds.tolist() == list(range(0, num_rows + 1, num_rows // num_sequences))
    assert inputs.token_rows.tolist() == [min(token, num_sequences - 1) for token in range(num_rows)]
    _, num_bytes = inputs.add_norm_mix(6)
    residual, shift, delta_and_mixed, mix = 2 * 4 * num_rows, 2 * 2 * num_sequences, 7 * 2 * num_rows, 6 * 2
    assert num_bytes == 128 * (residual + shift + delta_and_mixed + mix)


def test_the_slower_of_memory_and_arithmetic_is_the_limit() -> None:
    cost = StepCost(weight_bytes=60, state_bytes=40, flops=1000)
    assert (cost.seconds(bandwidth=10, gemm_rate=1000), cost.limit(10, 1000)) == (10, "bandwidth")
    assert (cost.seconds(bandwidth=100, gemm_rate=100), cost.limit(100, 100)) == (10, "compute")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void albatross::tmix_decode_file::tmix_decode_kernel<__half, 64>(albatross::TmixParams)", "tmix_decode_kernel"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int, 4>(int*)", "CatArrayBatchedCopy"),
        ("void at::native::elementwise_kernel<128, at::A<(int)2>, f(std::pair<int, long>)>(int, long)", "elementwise_kernel"),
        ("nvjet_hsh_128x64_64x8_2x1_v_bz_TNT", "nvjet_hsh_128x64_64x8_2x1_v_bz_TNT"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ],
)
def test_kernels_are_shown_by_the_name_of_their_function(name: str, short: str) -> None:
    assert profile.short_name(name) == short


def test_calls_of_one_kernel_are_summed_over_the_steps_and_ranked() -> None:
    events = [("void a<1>(int)", 1.0), ("void a<2>(int)", 2.0), ("b", 4.0)] * profile.STEPS
    assert profile.group(events) == [("b", 1.0, 4.0), ("a", 2.0, 3.0)]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("tmix_decode_kernel", "recurrence"), ("add_norm_mix_kernel", "norm and mix"), ("linear_rows_kernel", "products"),
        ("linear_sparse_kernel", "products"), ("nvjet_hsh_128x64", "products"), ("sample_kernel", "draw"),
        ("wkv7_prefill_kernel", "recurrence"), ("searchsorted_cuda_kernel", "moves"), ("radix_sort_kernel", "draw"),
        ("Memcpy HtoD", "moves"), ("frobnicate", "other"), ("tmix_prefill_kernel", "recurrence"),
        ("tmix_summary_kernel", "recurrence"), ("tmix_prepare_kernel", "norm and mix"),
    ],
)  # fmt: skip
def test_a_kernel_belongs_to_the_part_of_the_step_that_its_name_tells(name: str, family: str) -> None:
    assert profile.Kernel(name, 1, 1.0).family == family


def test_a_profile_holds_families_of_known_work_against_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [profile.Kernel("gemm", 8, 60.0), profile.Kernel("tmix_decode", 2, 30.0), profile.Kernel("add_norm", 2, 10.0)]
    monkeypatch.setattr(profile, "record", lambda step: kernels)
    known = {
        "products": profile.Work(30_000_000_000, 1e15, "TFLOP/s"), "recurrence": profile.Work(30_000_000, 4e12, "GB/s")
    }  # fmt: skip
    results = {result.name: result for result in profile.profile_steps("t", lambda: None, known)}
    products, recurrence = results["t: all products"], results["t: all recurrence"]
    assert (products.value, products.ratio, products.details["flops"]) == (500, 0.5, 30_000_000_000)
    assert (recurrence.value, recurrence.unit, recurrence.details["bytes"]) == (1000, "GB/s", 30_000_000)
    assert results["t: gemm"].details["share"] == 0.6
    assert results["t: all norm and mix"].unit == "us"


def write_part(folder: Path, name: str, commit: str, **figures: float) -> Path:
    path = folder / name
    rows = [{"name": name, "value": value} for name, value in figures.items()]
    path.write_text(json.dumps({"machine": {"commit": commit, "gpus": ["H200"], "date": name}, "results": rows}))
    return path


def figures(path: Path) -> dict[str, float]:
    return {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}


def test_parts_join_a_file_of_their_commit_and_replace_what_was_measured_again(tmp_path: Path) -> None:
    out = write_part(tmp_path, "all.json", "c1", a=1.0, b=2.0)
    parts = [write_part(tmp_path, "x.json", "c1", b=3.0), write_part(tmp_path, "y.json", "c1", c=4.0)]
    merge.merge(out, parts)
    assert figures(out) == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_of_another_commit_is_replaced(tmp_path: Path) -> None:
    out = write_part(tmp_path, "all.json", "c1", a=1.0)
    merge.merge(out, [write_part(tmp_path, "x.json", "c2", b=3.0)])
    assert figures(out) == {"b": 3.0}


def test_parts_of_two_commits_are_not_joined_and_stay(tmp_path: Path) -> None:
    parts = [write_part(tmp_path, "x.json", "c1", a=1.0), write_part(tmp_path, "y.json", "c2", b=2.0)]
    with pytest.raises(ConfigError, match="c1 on H200; c2 on H200"):
        merge.merge(tmp_path / "all.json", parts)
    assert all(part.is_file() for part in parts)
    assert not (tmp_path / "all.json").exists()


@pytest.mark.parametrize("arguments", [("--skip", "everything"), ("--only",), ("--fast",)])
def test_the_gpu_check_refuses_a_part_or_option_it_does_not_have(arguments: tuple[str, ...]) -> None:
    command = ["bash", str(ROOT / "ci" / "gpu_check.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_the_gpu_check_measures_with_benchmarks_that_exist() -> None:
    script = (ROOT / "ci" / "gpu_check.sh").read_text()
    parts = set(re.findall(r"^ *measure (\w+)", script, re.MULTILINE))
    listed = re.search(r'^all="(.+)"', script, re.MULTILINE)
    assert listed is not None
    assert parts | {"build", "tests", "wheel", "older"} == set(listed[1].split())
    assert {part for part in parts if not (ROOT / "bench" / f"{part}.py").is_file()} == set()
