"""What an engine's settings come to on this machine."""

import pytest
import torch

from albatross.config import EngineConfig
from albatross.engine.model_runner import ModelRunner


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "float16", "state_dtype": "float32"}, torch.float32),
        ({"state_dtype": "float16"}, torch.float16),
    ],
)
def test_the_state_has_the_type_of_the_weights_unless_it_is_named(settings: dict[str, str], expected: torch.dtype) -> None:
    runner = ModelRunner(EngineConfig(device="cpu", num_threads=1, max_num_seqs=1, **settings))
    assert runner.pool.wkv.dtype is expected
