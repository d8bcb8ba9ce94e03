"""Runs one scheduled step: packs its rows, runs the model once, forks states and draws. Owns model, pool and sampler.

Knows slots and rows; knows nothing of queues, text or processes. Called by `core.EngineCore`, once a step.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from albatross.config import EngineConfig
from albatross.engine.graphs import DecodeGraphs
from albatross.engine.messages import EngineReady
from albatross.engine.sampler import Sampler, Samples
from albatross.engine.scheduler import Step
from albatross.errors import ConfigError
from albatross.models.rwkv7 import RWKV7, load_model


class Runner(Protocol):
    """What the core needs of a runner; tests put scripted logits behind it."""

    num_slots: int
    vocab_size: int
    device: torch.device

    def run(self, step: Step) -> Samples: ...

    def forbid(self, token_ids: Sequence[int]) -> None: ...

    def describe(self, model_name: str, load_s: float) -> EngineReady: ...


class ModelRunner:
    """`run` is the whole interface; everything else is set up once."""

    def __init__(self, config: EngineConfig) -> None:
        device = resolve_device(config.device)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.model: RWKV7 = load_model(
            config.model_path,
            device=device,
            dtype=resolve_dtype(config.dtype, device),
            state_dtype=config.state_dtype,
            backend=resolve_backend(config.backend, device),
        )
        self.device = self.model.device
        self.vocab_size = self.model.config.vocab_size
        self.num_slots = config.max_num_seqs
        self.pool = self.model.new_state_pool(config.max_num_seqs)
        self.sampler = Sampler(self.num_slots, self.vocab_size, self.device)
        self.graphs: DecodeGraphs | None = None
        if config.cuda_graphs and self.device.type == "cuda" and self.model.backend == "native":
            with torch.inference_mode(), torch.cuda.device(self.device):
                self.graphs = DecodeGraphs(self.model, self.pool, self.num_slots)

    @torch.inference_mode()
    def run(self, step: Step) -> Samples:
        for request in step.admitted:
            self.sampler.assign(request)
        if step.admitted:
            self.pool.zero([request.streams[0].slot for request in step.admitted])
        logits = self._forward(step)
        for row in step.rows:
            forks = [stream.slot for stream in row.samples if stream.slot != row.slot]
            if forks:
                self.pool.copy(row.slot, forks)
        streams = [stream for row in step.rows for stream in row.samples]
        if not streams:
            return Samples([], [], {})
        return self.sampler.sample(logits, [stream.slot for stream in streams], [stream.num_generated for stream in streams])

    def forbid(self, token_ids: Sequence[int]) -> None:
        self.sampler.forbid(token_ids)

    def describe(self, model_name: str, load_s: float) -> EngineReady:
        model = self.model
        return EngineReady(
            model_name=model_name,
            vocab_size=self.vocab_size,
            num_layers=model.config.num_layers,
            hidden_size=model.config.hidden_size,
            device=str(self.device),
            dtype=str(model.dtype).removeprefix("torch."),
            state_dtype=str(model.state_dtype).removeprefix("torch."),
            backend=model.backend,
            num_slots=self.num_slots,
            state_bytes=self.pool.slot_bytes,
            load_s=load_s,
        )

    def _forward(self, step: Step) -> torch.Tensor:
        tokens: array[int] = array("I")
        ends = [0]
        wanted = []
        for row in step.rows:
            tokens.extend(row.tokens)
            ends.append(len(tokens))
            wanted.extend([len(tokens) - 1] * len(row.samples))
        ids = torch.from_numpy(np.frombuffer(tokens, np.uint32).astype(np.int64))
        slots = torch.tensor([row.slot for row in step.rows], dtype=torch.int32)
        logits_index = torch.tensor(wanted, dtype=torch.long).to(self.device)
        if self.graphs is not None and step.is_decode:
            logits = self.graphs.run(ids, slots)
            return logits if wanted == list(range(len(slots))) else logits[logits_index]
        bounds = torch.tensor(ends, dtype=torch.int32)
        return self.model.forward(
            ids.to(self.device), bounds.to(self.device), slots.to(self.device), logits_index, self.pool, is_decode=step.is_decode
        )


def resolve_device(device: str) -> str:
    """The device meant by a setting. Raises ConfigError if a CUDA card is asked for and torch sees none."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {device}, but torch {torch.__version__} sees no CUDA card; use --device cpu or auto.")
        index = int(device.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device is {device}, but there are only {torch.cuda.device_count()} CUDA cards, counted from 0.")
    return device


def resolve_dtype(dtype: str, device: str) -> str:
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "float16"


def resolve_backend(backend: str, device: str) -> str:
    """The backend meant by a setting. Raises ConfigError for the native one on a CPU, where it has no kernels."""
    if backend == "native" and device == "cpu":
        raise ConfigError(
            "backend is native, but the device is the CPU, for which only the reference exists; use --backend auto."
        )
    if backend != "auto":
        return backend
    return "reference" if device == "cpu" else "native"
