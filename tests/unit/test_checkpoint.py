"""Model files: every container and type opens, and everything else is refused with its own sentence, quickly and unexecuted."""

import io
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import save_file

from albatross.config import EngineConfig, ModelConfig
from albatross.errors import CheckpointError, UnsupportedModelError
from albatross.models.checkpoint import open_checkpoint
from albatross.models.synth import make_tensors

CONFIG = ModelConfig(num_layers=2, hidden_size=128, ffn_size=200, vocab_size=70, w_rank=5, a_rank=6, v_rank=7, g_rank=8)
CPU = torch.device("cpu")

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return dict(make_tensors(CONFIG, "cpu", 0, torch.bfloat16))


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Any], Path]:
    def save_content(content: Any) -> Path:
        torch.save(content, tmp_path / "model.pth")
        return tmp_path / "model.pth"

    return save_content


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_bytes(data: bytes) -> Path:
        (tmp_path / "model.pth").write_bytes(data)
        return tmp_path / "model.pth"

    return write_bytes


def refusal(path: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    """The sentence a file is refused with, within two seconds."""
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert time.monotonic() - start < 2
    assert type(caught.value) is kind
    text = str(caught.value)
    assert str(path) in text
    assert text.endswith(".")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["model.pth", "model.safetensors", "safetensors in disguise.pth"])
def test_every_container_and_type_gives_the_same_sizes_and_weights(
    weights: Weights, tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    path = tmp_path / name
    stored = {key: tensor.to(dtype) for key, tensor in weights.items()}
    if "safetensors" in name:
        save_file(stored, path)
    else:
        torch.save(stored, path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == CONFIG
    for key, tensor in stored.items():
        assert torch.equal(checkpoint.take(key, CPU, torch.float32), tensor.float())
    checkpoint.check_values()


def test_the_demo_model_opens_with_its_sizes() -> None:
    checkpoint = open_checkpoint(EngineConfig(model="demo").model_path)
    assert checkpoint.config == ModelConfig(8, 256, 1024, 4096, 32, 32, 32, 64)


def test_a_taken_tensor_is_a_copy_and_not_the_file(weights: Weights, save: Callable[[Any], Path]) -> None:
    path = save({name: tensor.float() for name, tensor in weights.items()})
    taken = open_checkpoint(path).take("head.weight", CPU, torch.float32)
    taken.zero_()
    assert torch.equal(open_checkpoint(path).take("head.weight", CPU, torch.float32), weights["head.weight"].float())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "There is no file" in refusal(tmp_path / "absent.pth")


def test_a_directory_is_named(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is empty"),
        (b"GGUF\x03\0\0\0" + bytes(200), "is a GGUF or ggml file"),
        (b"fmgg\x65\0\0\0" + bytes(200), "is a GGUF or ggml file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 382113542\n",
            "is a git-lfs pointer, not the model itself",
        ),
        (b"<!DOCTYPE html>\n<html><head><title>Not found</title>", "is a web page"),
        (b"\n <HTML lang='en'><body>Sign in</body></HTML>", "is a web page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "is a web page"),
        (json.dumps({"error": "Repository not found"}).encode(), "is JSON"),
        (b"Entry not found", "is a text file"),
        ("模型不存在。".encode(), "is a text file"),
        (bytes(range(128, 256)) * 8, "is of an unknown kind (it starts with the bytes 80 81 82 83 84 85 86 87)"),
        (b"\xff\xfe\x00\x01" * 99, "is of an unknown kind (it starts with the bytes ff fe 00 01 ff fe 00 01)"),
        (bytes(4096), "is of an unknown kind (it starts with the bytes 00 00 00 00 00 00 00 00)"),
        (pickle.dumps({"emb.weight": [1.0]}), "is a bare pickle, which is not opened because it could run code"),
        (b"PK\x03\x04" + bytes(500), "is cut short or damaged: its zip archive has no end"),
        ((400).to_bytes(8, "little") + b'{"emb.weight": {"dtype"', "is cut short or damaged: its header cannot be read"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_recognised_by_its_content(write: Callable[[bytes], Path], data: bytes, sentence: str) -> None:
    assert sentence in refusal(write(data))


def test_a_torch_file_of_the_legacy_format_is_named(weights: Weights, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    assert "is in torch's legacy format from before torch 1.6" in refusal(path)


@pytest.mark.parametrize("fraction", [0.001, 0.6, 0.99])
def test_a_torch_file_cut_short_is_named(weights: Weights, save: Callable[[Any], Path], fraction: float) -> None:
    path = save(weights)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    assert "is cut short or damaged" in refusal(path)


def test_a_safetensors_file_cut_short_is_named_with_both_sizes(weights: Weights, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 10])
    assert f"is cut short: {len(data) * 6 // 10} bytes of {len(data)}" in refusal(path)


def test_a_zip_archive_of_something_else_is_named(write: Callable[[bytes], Path]) -> None:
    buffer = io.BytesIO()
    with ZipFile(buffer, "w") as archive:
        archive.writestr("word/document.xml", "<w:document/>")
    assert "is a zip archive without a torch state dict" in refusal(write(buffer.getvalue()))


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_a_file_is_refused_and_never_runs(weights: Weights, save: Callable[[Any], Path], tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    path = save({**weights, "extra": Hostile(trap)})
    text = refusal(path)
    assert "holds Python objects other than tensors" in text
    assert "loading it could run code" in text
    assert not trap.exists()
    torch.load(path, weights_only=False)
    assert trap.exists()  # the trap works where code may run


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([torch.zeros(2)], "holds a list; expected a state dict of tensors"),
        (torch.zeros(2), "holds a Tensor; expected a state dict of tensors"),
        ({}, "holds an empty dict"),
        (
            {"epoch": 3, "model": {"emb.weight": torch.zeros(2)}},
            "holds 2 entries that are no tensors ('epoch': int, 'model': dict)",
        ),
    ],
)
def test_contents_that_are_no_state_dict_are_named(save: Callable[[Any], Path], content: Any, sentence: str) -> None:
    assert sentence in refusal(save(content))


RWKV4 = ("att.time_decay", "att.time_first", "att.time_mix_k", "att.key.weight", "ffn.time_mix_k", "ffn.receptance.weight")
RWKV5 = ("att.time_decay", "att.time_faaaa", "att.time_mix_k", "att.ln_x.weight", "att.gate.weight", "ffn.time_mix_k")
RWKV6 = ("att.time_decay", "att.time_faaaa", "att.time_maa_x", "att.time_maa_w1", "att.ln_x.weight", "ffn.time_maa_k")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([f"blocks.{layer}.{name}" for layer in (0, 1) for name in RWKV4], "This is an RWKV-4 model"),
        ([f"blocks.{layer}.{name}" for layer in (0, 1) for name in RWKV5], "This is an RWKV-5 model"),
        ([f"blocks.{layer}.{name}" for layer in (0, 1) for name in RWKV6], "This is an RWKV-6 model"),
        (["blocks.0.att.time_state", "blocks.1.att.time_state"], "holds only tuned states (time_state)"),
        (["blocks.0.att.key.lora_A", "blocks.0.att.key.lora_B"], "holds only an adapter"),
        (["base_model.model.blocks.0.att.key.lora_A.default.weight"], "holds only an adapter"),
        (["model.embeddings.weight", "model.layers.0.attn.r_proj.weight", "lm_head.weight"], "Hugging Face or fla layout"),
        (["rwkv.blocks.0.attention.time_decay"], "Hugging Face or fla layout"),
        (
            ["model.layers.0.self_attn.q_proj.weight"],
            "Hugging Face or fla layout (such as 'model.layers.0.self_attn.q_proj.weight')",
        ),
        (["conv1.weight", "fc.bias"], "found 2 tensors of another model (conv1.weight, fc.bias)"),
    ],
)
def test_other_models_are_named(save: Callable[[Any], Path], names: list[str], sentence: str) -> None:
    shared = {"emb.weight": torch.zeros(4, 8), "head.weight": torch.zeros(4, 8)} if names[0].startswith("blocks") else {}
    assert sentence in refusal(save(shared | {name: torch.zeros(8) for name in names}), UnsupportedModelError)


def test_every_fault_of_a_layout_is_listed_at_once(weights: Weights, save: Callable[[Any], Path]) -> None:
    broken = dict(weights)
    del broken["blocks.1.att.r_k"], broken["ln_out.bias"]
    broken["blocks.1.ffn.extra"] = torch.zeros(3)
    broken["head.weight"] = torch.zeros(60, 128)
    broken["blocks.0.att.w0"] = torch.zeros(1, 1, 64)
    broken["blocks.0.ln1.bias"] = torch.zeros(128, dtype=torch.int8)
    text = refusal(save(broken))
    assert "2 tensors are missing (ln_out.bias, blocks.1.att.r_k)" in text
    assert "1 tensor is unexpected (blocks.1.ffn.extra)" in text
    assert "2 tensors are of the wrong shape (head.weight [60, 128] instead of [70, 128], blocks.0.att.w0 [1, 1, 64]" in text
    assert "1 tensor is neither bfloat16, float16 nor float32 (blocks.0.ln1.bias int8)" in text


def test_a_long_list_of_faults_is_cut_and_counted(weights: Weights, save: Callable[[Any], Path]) -> None:
    text = refusal(save({name: tensor for name, tensor in weights.items() if not name.startswith("blocks.1.")} | {
        "blocks.1.att.r_k": weights["blocks.1.att.r_k"]}))  # fmt: skip
    assert "32 tensors are missing" in text
    assert "and 24 more" in text
    assert len(text) < 500


def test_a_damaged_block_number_does_not_exhaust_memory(weights: Weights, save: Callable[[Any], Path]) -> None:
    assert "names a block 999999999" in refusal(save(weights | {"blocks.999999999.att.r_k": torch.zeros(2, 64)}))


def test_vectors_may_come_flat_and_the_unused_tensors_of_layer_0_be_absent(weights: Weights, save: Callable[[Any], Path]) -> None:
    flat = {name: tensor.flatten() if tensor.dim() == 3 else tensor for name, tensor in weights.items()}
    for name in ("v0", "v1", "v2"):
        del flat[f"blocks.0.att.{name}"]
    assert open_checkpoint(save(flat)).config == CONFIG


def test_another_head_size_is_refused_by_name(weights: Weights, save: Callable[[Any], Path]) -> None:
    other = {name: tensor.view(1, 128) if name.endswith("r_k") else tensor for name, tensor in weights.items()}
    assert "this one has heads of 128 channels and width 128" in refusal(save(other), UnsupportedModelError)


def test_a_width_that_is_no_multiple_of_the_head_size_is_refused_by_name(save: Callable[[Any], Path]) -> None:
    narrow = ModelConfig(num_layers=1, hidden_size=96, ffn_size=200, vocab_size=70, w_rank=5, a_rank=6, v_rank=7, g_rank=8)
    assert "width 96" in refusal(save(dict(make_tensors(narrow, "cpu", 0, torch.float32))), UnsupportedModelError)


@pytest.mark.parametrize(
    ("value", "dtype", "sentence"),
    [
        (1e5, torch.float16, "head.weight reaches 9.984e+04"),
        (-1e5, torch.float16, "head.weight reaches 9.984e+04"),
        (float("nan"), torch.float32, "head.weight holds NaN or infinity"),
        (float("-inf"), torch.float32, "head.weight holds NaN or infinity"),
        (float("nan"), torch.float16, "head.weight holds NaN or infinity"),
    ],
)
def test_weights_the_type_cannot_hold_are_named(
    weights: Weights, save: Callable[[Any], Path], value: float, dtype: torch.dtype, sentence: str
) -> None:
    broken = weights | {"head.weight": weights["head.weight"].clone()}
    broken["head.weight"][3, 5] = value
    checkpoint = open_checkpoint(save(broken))
    for name in ("head.weight", "emb.weight"):
        checkpoint.take(name, CPU, dtype)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_values()
    assert sentence in str(caught.value)
    assert "emb.weight" not in str(caught.value)


def test_large_finite_weights_pass_in_float32(weights: Weights, save: Callable[[Any], Path]) -> None:
    checkpoint = open_checkpoint(save(weights | {"head.weight": weights["head.weight"] + 1e5}))
    checkpoint.take("head.weight", CPU, torch.float32)
    checkpoint.check_values()
