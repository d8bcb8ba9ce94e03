"""How far the demo model is from float64: the worst relative error over the golden prompts, by type of weights and state.

    python -m bench.golden [--device cuda] [--out FILE]

The goldens lie in tests/data; an error is ||found - expected|| / ||expected|| of one prompt's logits or states.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from albatross.config import EngineConfig
from albatross.engine.model_runner import resolve_backend, resolve_device
from albatross.models.rwkv7 import RWKV7, load_model
from bench.timing import ROOT, Result, make_parser, write_report

GOLDENS = ROOT / "tests" / "data" / "golden-logits.npz"
BOUNDS = {"float32": (2e-6, 2e-6), "float16": (3e-3, 8e-3)}  # of logits and states
TYPES = (("float32", "float32"), ("float16", "float32"), ("float16", "float16"))
Arrays = dict[str, npt.NDArray[Any]]


def errors(model: RWKV7, arrays: Arrays, index: int) -> tuple[float, float]:
    """Of the last token's logits, and the worst of the final states, for one prompt read whole."""
    pool = model.new_state_pool(1)
    ids = torch.from_numpy(arrays[f"ids_{index}"]).long().to(model.device)
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32, device=model.device)
    slots = torch.zeros(1, dtype=torch.int32, device=model.device)
    logits = model.forward(ids, bounds, slots, bounds[1:].long() - 1, pool, is_decode=False)
    wkv, shift = pool.read(0)
    states = [(shift[:, 0], f"shift_tmix_{index}"), (shift[:, 1], f"shift_cmix_{index}"), (wkv, f"wkv_{index}")]
    return (
        relative_error(logits[0], arrays[f"logits_{index}"]),
        max(relative_error(found, arrays[name]) for found, name in states if name in arrays),
    )


def relative_error(found: torch.Tensor, expected: npt.NDArray[Any]) -> float:
    wanted = expected.astype(np.float64)
    return float(np.linalg.norm(found.double().cpu().numpy() - wanted) / np.linalg.norm(wanted))


def main() -> None:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = resolve_device(args.device)
    with np.load(GOLDENS) as file:
        arrays = dict(file)
    results = []
    for dtype, state_dtype in TYPES:
        backend = resolve_backend("auto", device)
        model = load_model(EngineConfig().model_path, device=device, dtype=dtype, state_dtype=state_dtype, backend=backend)
        found = [errors(model, arrays, index) for index in range(sum(name.startswith("ids_") for name in arrays))]
        for what, values, bound in zip(("logits", "states"), zip(*found, strict=True), BOUNDS[dtype], strict=True):
            name = f"golden {what}, {dtype} with {state_dtype} state, {model.device.type}"
            results.append(Result(name, max(values), "relative error", bound, {"each": list(values)}))
    write_report(results, args.out)


if __name__ == "__main__":
    main()
