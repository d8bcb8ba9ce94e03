"""What tests of several folders share: the demo model and its float64 goldens."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from albatross.config import EngineConfig

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session")
def demo_path() -> Path:
    return EngineConfig(model="demo").model_path


@pytest.fixture(scope="session")
def goldens() -> "list[dict[str, torch.Tensor]]":
    """Eight prompts: ids, logits [V], shift [L, 2, C] and, for some, wkv [L, H, N, N]."""
    import numpy as np
    import torch

    with np.load(Path(__file__).parent / "data" / "golden-logits.npz") as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    cases = []
    for i in range(8):
        shift = torch.stack((arrays[f"shift_tmix_{i}"], arrays[f"shift_cmix_{i}"]), dim=1)
        case = {"ids": arrays[f"ids_{i}"].long(), "logits": arrays[f"logits_{i}"], "shift": shift}
        cases.append(case | ({"wkv": arrays[f"wkv_{i}"]} if f"wkv_{i}" in arrays else {}))
    return cases
