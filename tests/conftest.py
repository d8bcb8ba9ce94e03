"""What tests of several folders share: the demo model, its float64 goldens and its evaluation set."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from albatross.config import EngineConfig

if TYPE_CHECKING:
    import torch

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def demo_path() -> Path:
    return EngineConfig(model="demo").model_path


@pytest.fixture(scope="session")
def goldens() -> "list[dict[str, torch.Tensor]]":
    """Eight prompts: ids, logits [V], shift [L, 2, C] and, for some, wkv [L, H, N, N]."""
    import numpy as np
    import torch

    with np.load(DATA / "golden-logits.npz") as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    cases = []
    for i in range(8):
        shift = torch.stack((arrays[f"shift_tmix_{i}"], arrays[f"shift_cmix_{i}"]), dim=1)
        case = {"ids": arrays[f"ids_{i}"].long(), "logits": arrays[f"logits_{i}"], "shift": shift}
        cases.append(case | ({"wkv": arrays[f"wkv_{i}"]} if f"wkv_{i}" in arrays else {}))
    return cases


@pytest.fixture(scope="session")
def evaluation() -> list[dict[str, Any]]:
    """480 questions with the greedy text of the float32 reference."""
    return [json.loads(line) for line in (DATA / "eval-11.jsonl").read_text().splitlines()]
