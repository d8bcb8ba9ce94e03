"""Synthetic checkpoints: shapes of the released models, statistics of trained ones, the same for the same seed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from albatross.config import EngineConfig, ModelConfig
from albatross.errors import ConfigError
from albatross.models import synth
from albatross.models.checkpoint import open_checkpoint
from albatross.models.layout import check_layout
from albatross.models.rwkv7 import RWKV7
from albatross.reference import ops
from model.batches import run

SMALL = ModelConfig(num_layers=2, hidden_size=256, ffn_size=1024, vocab_size=300, w_rank=8, a_rank=8, v_rank=8, g_rank=16)


@pytest.fixture
def small_size(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(synth.SIZES, "small", SMALL)
    return "small"


def test_the_sizes_are_those_of_the_released_models() -> None:
    found = {
        name: (size.num_layers, size.hidden_size, size.w_rank, size.a_rank, size.v_rank, size.g_rank)
        for name, size in synth.SIZES.items()
    }
    assert found == {
        "0.1b": (12, 768, 64, 64, 32, 128), "0.4b": (24, 1024, 64, 64, 32, 128), "1.5b": (24, 2048, 96, 96, 64, 256),
        "2.9b": (32, 2560, 96, 96, 64, 320), "7.2b": (32, 4096, 128, 128, 96, 480), "13.3b": (61, 4096, 128, 128, 96, 480),
    }  # fmt: skip
    assert {size.vocab_size for size in synth.SIZES.values()} == {65536}


def test_a_written_checkpoint_opens_with_its_sizes_and_runs(small_size: str, tmp_path: Path, load: Callable[..., RWKV7]) -> None:
    path = tmp_path / "small.pth"
    synth.write_checkpoint(small_size, path, 5)
    assert open_checkpoint(path).config == SMALL
    assert open_checkpoint(path).tensors["emb.weight"].dtype == torch.bfloat16
    model = load(path, dtype="float16")
    assert run(model, model.new_state_pool(1), [(0, list(range(40)))]).isfinite().all()
    assert list(tmp_path.iterdir()) == [path]


def test_names_order_and_shapes_are_those_of_the_official_files(demo_path: Path) -> None:
    demo = torch.load(demo_path, weights_only=True)
    made = list(synth.make_tensors(check_layout(demo), "cpu", 0, torch.bfloat16))
    assert {name: tensor.shape for name, tensor in made} == {name: tensor.shape for name, tensor in demo.items()}


def test_progress_rises_to_the_total(small_size: str, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    synth.write_checkpoint(small_size, tmp_path / "small.pth", 0, lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert {total for _, total in calls} == {calls[-1][0]}


def test_a_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, second, other = (dict(synth.make_tensors(SMALL, "cpu", seed, torch.float32)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_no_two_matrices_of_a_checkpoint_are_alike() -> None:
    weights = dict(synth.make_tensors(SMALL, "cpu", 0, torch.float32))
    square = [tensor for name, tensor in weights.items() if name.endswith(("receptance.weight", "att.key.weight"))]
    assert len({float(tensor.sum()) for tensor in square}) == len(square) == 4


def test_a_synthetic_checkpoint_gives_what_the_file_holds_in_any_order(small_size: str, tmp_path: Path) -> None:
    path, device = tmp_path / "small.pth", torch.device("cpu")
    synth.write_checkpoint(small_size, path, 5, dtype=torch.float16)
    file, made = open_checkpoint(path), synth.open_synthetic(small_size, 5)
    assert made.config == file.config
    for name in reversed(list(file.tensors)):
        assert torch.equal(made.take(name, device, torch.float32), file.take(name, device, torch.float32))
    made.check_values()


def test_an_open_synthetic_checkpoint_holds_no_values() -> None:
    made = synth.open_synthetic("13.3b")
    assert {tensor.device.type for tensor in made.tensors.values()} == {"meta"}
    assert check_layout(made.tensors) == synth.SIZES["13.3b"]


def test_a_model_is_made_where_its_path_names_a_size(small_size: str, load: Callable[..., RWKV7]) -> None:
    model = load(EngineConfig(model="synth:small").model_path, dtype="float16")
    assert model.config == SMALL
    assert run(model, model.new_state_pool(1), [(0, list(range(40)))]).isfinite().all()


def test_a_synthetic_model_is_called_by_its_size() -> None:
    assert EngineConfig(model="synth:7.2b").model_name == "synth:7.2b"


def test_a_synthetic_model_of_unknown_size_is_refused(load: Callable[..., RWKV7]) -> None:
    with pytest.raises(ConfigError, match=r"no size '3b'"):
        load(Path("synth:3b"))


def test_nine_in_ten_squared_relus_are_zero_and_decays_are_spread() -> None:
    weights = dict(synth.make_tensors(SMALL, "cpu", 0, torch.float32))
    x = ops.layer_norm(torch.randn(200, 256), weights["blocks.1.ln2.weight"], weights["blocks.1.ln2.bias"])
    is_zero = x @ weights["blocks.1.ffn.key.weight"].T <= 0
    assert 0.88 < is_zero.float().mean() < 0.95
    decays = ops.decay(weights["blocks.1.att.w0"])
    assert decays.min() < 0.6
    assert decays.max() > 0.99


def test_an_unknown_size_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no size '3b'; choose one of 0\.1b, 0\.4b"):
        synth.write_checkpoint("3b", tmp_path / "model.pth")


def test_an_unwritable_path_is_refused_and_leaves_nothing_behind(small_size: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/model\.pth cannot be written"):
        synth.write_checkpoint(small_size, tmp_path / "missing" / "model.pth")
    (tmp_path / "taken.pth").mkdir()
    with pytest.raises(ConfigError, match=r"taken\.pth cannot be written"):
        synth.write_checkpoint(small_size, tmp_path / "taken.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.pth"]
