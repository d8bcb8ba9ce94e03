"""The names and shapes of an RWKV-7 (x070) state dict, and how files of other models are told apart from it.

Knows tensors by name, shape and type only; where they come from is the business of `checkpoint`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch

from albatross.config import ModelConfig
from albatross.constants import HEAD_SIZE
from albatross.errors import CheckpointError, UnsupportedModelError

# Shapes as letters: V vocabulary, C width, F hidden width of cmix, H heads, N head size; w a v g the LoRA ranks.
# A one-letter shape may carry further dimensions of one, as [1, 1, C] does in the official files.
TOP_SHAPES = {
    "emb.weight": "VC", "blocks.0.ln0.weight": "C", "blocks.0.ln0.bias": "C",
    "ln_out.weight": "C", "ln_out.bias": "C", "head.weight": "VC",
}  # fmt: skip
BLOCK_SHAPES = {
    "ln1.weight": "C", "ln1.bias": "C", "ln2.weight": "C", "ln2.bias": "C",
    "att.x_r": "C", "att.x_w": "C", "att.x_k": "C", "att.x_v": "C", "att.x_a": "C", "att.x_g": "C",
    "att.w0": "C", "att.w1": "Cw", "att.w2": "wC", "att.a0": "C", "att.a1": "Ca", "att.a2": "aC",
    "att.v0": "C", "att.v1": "Cv", "att.v2": "vC", "att.g1": "Cg", "att.g2": "gC",
    "att.k_k": "C", "att.k_a": "C", "att.r_k": "HN",
    "att.receptance.weight": "CC", "att.key.weight": "CC", "att.value.weight": "CC", "att.output.weight": "CC",
    "att.ln_x.weight": "C", "att.ln_x.bias": "C",
    "ffn.x_k": "C", "ffn.key.weight": "FC", "ffn.value.weight": "CF",
}  # fmt: skip
UNUSED_IN_FIRST_LAYER = ("att.v0", "att.v1", "att.v2")  # layer 0 has no value of an earlier layer to mix in; files may omit them
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_LISTED = 8  # names shown of each kind of fault; the rest is counted

_BLOCK_KEY = re.compile(r"blocks\.(\d{1,9})\.(.+)")
_ADAPTER_KEY = re.compile(r"lora_|\.lora\.|\.bone$|\.disha$|base_model\.model\.")
_HUGGING_FACE_KEY = re.compile(r"(^|\.)(model|transformer|rwkv|backbone)\.(layers|h|blocks|embeddings)\.|(^|\.)layers\.\d+\.")


def expected_shapes(num_layers: int) -> Iterator[tuple[str, str]]:
    """Every tensor of a complete file as (name, shape in letters), the optional ones of layer 0 included."""
    yield from TOP_SHAPES.items()
    for layer in range(num_layers):
        for name, shape in BLOCK_SHAPES.items():
            yield f"blocks.{layer}.{name}", shape


def letter_sizes(config: ModelConfig) -> dict[str, int]:
    """What each letter of a shape stands for in a model of these sizes."""
    return {
        "V": config.vocab_size, "C": config.hidden_size, "F": config.ffn_size, "H": config.num_heads, "N": HEAD_SIZE,
        "w": config.w_rank, "a": config.a_rank, "v": config.v_rank, "g": config.g_rank,
    }  # fmt: skip


def is_optional(name: str) -> bool:
    return name in {f"blocks.0.{unused}" for unused in UNUSED_IN_FIRST_LAYER}


def check_layout(tensors: Mapping[str, torch.Tensor]) -> ModelConfig:
    """The sizes of the RWKV-7 model that `tensors` holds.

    Raises UnsupportedModelError for another kind of model, and CheckpointError listing every missing, unexpected
    and mis-shaped tensor at once.
    """
    _refuse_other_models(tensors)
    num_layers = 1 + max(int(match[1]) for match in map(_BLOCK_KEY.fullmatch, tensors) if match)
    if num_layers > len(tensors):
        raise CheckpointError(f"The file names a block {num_layers - 1} but holds only {len(tensors)} tensors; it is damaged.")
    expected = dict(expected_shapes(num_layers))
    sizes = _vote_on_sizes(tensors, expected)
    if sizes["N"] != HEAD_SIZE or sizes["C"] % HEAD_SIZE:
        raise UnsupportedModelError(
            f"Albatross runs RWKV-7 models with heads of {HEAD_SIZE} channels and a width that is a multiple of it; "
            f"this one has heads of {sizes['N']} channels and width {sizes['C']}."
        )
    sizes["H"] = sizes["C"] // HEAD_SIZE
    _refuse_faults(tensors, expected, sizes)
    return ModelConfig(
        num_layers=num_layers, hidden_size=sizes["C"], ffn_size=sizes["F"], vocab_size=sizes["V"],
        w_rank=sizes["w"], a_rank=sizes["a"], v_rank=sizes["v"], g_rank=sizes["g"],
    )  # fmt: skip


def _refuse_other_models(tensors: Mapping[str, torch.Tensor]) -> None:
    names = list(tensors)
    generation = _generation(names)
    if generation == "7":
        return
    if generation:
        raise UnsupportedModelError(f"This is an RWKV-{generation} model; Albatross runs RWKV-7 (x070) only.")
    if any(name.endswith("time_state") for name in names):
        raise UnsupportedModelError(
            "This file holds only tuned states (time_state), not a model; take the model's own file, or merge the states into it."
        )
    if any(_ADAPTER_KEY.search(name) for name in names):
        raise UnsupportedModelError(
            "This file holds only an adapter (LoRA or another PEFT kind), not a model; merge it into its base model first."
        )
    if any(_HUGGING_FACE_KEY.search(name) for name in names):
        raise UnsupportedModelError(
            f"The tensors are named in the Hugging Face or fla layout (such as {names[0]!r}); "
            "take the official RWKV-7 .pth, whose names look like 'blocks.0.att.r_k', or convert the names."
        )
    raise UnsupportedModelError(
        f"Expected an RWKV-7 model with tensors such as 'blocks.0.att.r_k'; found {len(names)} tensors "
        f"of another model ({', '.join(names[:3])})."
    )


def _generation(names: Iterable[str]) -> str | None:
    """The RWKV generation that official-style names belong to, or None if they are no RWKV blocks."""
    parts = {match[2] for match in map(_BLOCK_KEY.fullmatch, names) if match}
    if "att.time_maa_x" in parts or "att.time_maa_w1" in parts:
        return "6"
    if "att.time_faaaa" in parts or ("att.time_first" in parts and "att.ln_x.weight" in parts):
        return "5"
    if "att.time_first" in parts:
        return "4"
    return "7" if parts & {"att.r_k", "att.x_r", "att.w1", "att.a1"} else None


def _vote_on_sizes(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, str]) -> dict[str, int]:
    """The most common size for each letter, so that one damaged tensor is named instead of all others."""
    votes: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for name, letters in expected.items():
        if name in tensors:
            votes_of_tensor = zip(letters, _core_shape(tensors[name], letters), strict=False)
            for letter, size in votes_of_tensor:
                votes[letter][size] += 1
    return {letter: votes[letter].most_common(1)[0][0] if votes[letter] else 0 for letter in "VCFNwavg"} | {
        "N": votes["N"].most_common(1)[0][0] if votes["N"] else HEAD_SIZE
    }


def _core_shape(tensor: torch.Tensor, letters: str) -> tuple[int, ...]:
    return (tensor.numel(),) if len(letters) == 1 and tensor.numel() == max(tensor.shape, default=0) else tuple(tensor.shape)


def _refuse_faults(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    missing = [name for name in expected if name not in tensors and not is_optional(name)]
    unexpected = [name for name in tensors if name not in expected]
    wrong_shape, wrong_dtype = [], []
    for name, letters in expected.items():
        if name not in tensors:
            continue
        tensor, wanted = tensors[name], tuple(sizes[letter] for letter in letters)
        if _core_shape(tensor, letters) != wanted or not tensor.numel():
            wrong_shape.append(f"{name} {list(tensor.shape)} instead of {list(wanted)}")
        if tensor.dtype not in DTYPES:
            wrong_dtype.append(f"{name} {str(tensor.dtype).removeprefix('torch.')}")
    faults = [
        _listing(len(found), what, found)
        for what, found in (
            ("missing", missing), ("unexpected", unexpected), ("of the wrong shape", wrong_shape),
            ("neither bfloat16, float16 nor float32", wrong_dtype),
        )
        if found
    ]  # fmt: skip
    if faults:
        raise CheckpointError(f"The file is not a complete RWKV-7 model: {'; '.join(faults)}.")


def _listing(count: int, what: str, names: list[str]) -> str:
    more = f" and {count - MAX_LISTED} more" if count > MAX_LISTED else ""
    return f"{count} {'tensor is' if count == 1 else 'tensors are'} {what} ({', '.join(names[:MAX_LISTED])}{more})"
