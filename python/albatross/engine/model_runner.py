"""Gives a scheduled step to the device: packs its rows, runs the model once, forks states, scores prompts and draws.

Owns model, pool, sampler and scorer. Knows slots and rows; knows nothing of queues, text or processes. What a row draws stays on
the device, where the next step finds it; `core.EngineCore` launches a step and reads its results later.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from albatross.config import EngineConfig
from albatross.engine.graphs import StepGraphs, mixed_step
from albatross.engine.messages import EngineReady
from albatross.engine.pacing import Timing
from albatross.engine.packing import pack
from albatross.engine.sampler import Sampler, Samples
from albatross.engine.scheduler import Step
from albatross.engine.scoring import PendingScored, Scorer
from albatross.engine.sizes import graph_sizes
from albatross.engine.staging import Staging
from albatross.errors import ConfigError
from albatross.models.memory import require_free, within_memory
from albatross.models.rwkv7 import RWKV7, load_model

logger = logging.getLogger(__name__)


class Pending(Protocol):
    """A step that was given to the device."""

    def wait(self) -> Samples:
        """What the step drew, once it is known. Steps are waited for in the order of their launch, each once."""


class Runner(Protocol):
    """What the core needs of a runner; tests put scripted logits behind it."""

    num_slots: int
    vocab_size: int
    device: torch.device
    timings: Sequence[Timing]  # what steps are known to take before the first one

    def launch(self, step: Step) -> Pending:
        """Gives a step to the device, behind those before it; on CUDA nothing waits for any of them."""

    def forbid(self, token_ids: Sequence[int]) -> None: ...

    def describe(self, model_name: str, load_s: float) -> EngineReady: ...


class ModelRunner:
    """`launch` is the whole interface; everything else is set up once."""

    def __init__(self, config: EngineConfig) -> None:
        device = resolve_device(config.device)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        dtype = resolve_dtype(config.dtype, device)
        self.model: RWKV7 = load_model(
            config.model_path,
            device=device,
            dtype=dtype,
            state_dtype=dtype if config.state_dtype == "auto" else config.state_dtype,
            backend=resolve_backend(config.backend, device),
        )
        self.device = self.model.device
        self.vocab_size = self.model.config.vocab_size
        self.num_slots = config.max_num_seqs
        self.pool = self.model.new_state_pool(config.max_num_seqs)
        self.sampler = within_memory(
            lambda: Sampler(self.num_slots, self.vocab_size, self.device, self.model.backend),
            self.device, f"A sampler of {self.num_slots} slots", "lower max_num_seqs",
        )  # fmt: skip
        self.scorer = within_memory(lambda: Scorer(self.model), self.device, "Scoring prompts", "lower max_num_seqs")
        max_tokens, depth = config.token_budget(self.device.type), config.steps_ahead(self.device.type) + 1
        max_tokens = max(max_tokens, self.num_slots)
        self._staging = Staging(4 * self.num_slots + 1 + max_tokens, self.device, depth)
        self.graphs: StepGraphs | None = None
        self.timings: Sequence[Timing] = ()
        if config.autotune:
            self._tune()
        if config.cuda_graphs and self.device.type == "cuda" and self.model.backend == "native":
            with torch.inference_mode(), torch.cuda.device(self.device):
                self.graphs = self._capture(max_tokens, depth)
                self.timings = self.graphs.timings

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            for request in step.admitted:
                self.sampler.assign(request)
            if step.admitted:
                self.pool.zero([request.streams[0].slot for request in step.admitted])
            slots = [stream.slot for stream, _ in step.draws]
            logits, normed = self._advance(step, slots)
            for chunk in step.chunks:
                forks = [stream.slot for stream in chunk.samples if stream.slot != chunk.slot]
                if forks:
                    self.pool.copy(chunk.slot, forks)
            if normed is None:
                return self.sampler.collect(logits, slots)
            scores = self.scorer.launch(step, normed)
            return PendingScored(self.sampler.collect(logits, slots), scores)

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

    def _tune(self) -> None:
        started = time.monotonic()
        num_made = self.model.tune(graph_sizes(self.num_slots))
        if num_made:
            logger.info("measured %d kernel choices in %.1f s", num_made, time.monotonic() - started)

    def _capture(self, max_tokens: int, depth: int) -> StepGraphs:
        purpose = f"The capture of graphs of up to {self.num_slots} rows and {max_tokens} tokens"
        advice = "lower max_num_seqs or max_num_batched_tokens, or switch cuda_graphs off"
        require_free(2 * 4 * self.num_slots * self.vocab_size, self.device, purpose, advice)  # logits, as drawn from and kept
        return within_memory(
            lambda: StepGraphs(self.model, self.pool, self.sampler, max_tokens, depth), self.device, purpose, advice
        )

    def _advance(self, step: Step, slots: list[int]) -> tuple[Tensor, Tensor | None]:
        """The model and the draws of `slots`, whose raw logits are returned, [K, V]; with them, if the step is scored, what the
        scorer needs of all its tokens."""
        if self.graphs is not None and not step.chunks:
            return self.graphs.run_decode(slots), None
        packed, is_scored = pack(step), any(chunk.targets for chunk in step.chunks)
        if self.graphs is not None:
            return self.graphs.run_mixed(packed), self.graphs.normed if is_scored else None
        columns, is_decode = self._staging.upload(packed), len(packed.tokens) == len(packed.slots)
        normed = self.model.new_normed(len(packed.tokens)) if is_scored else None
        return mixed_step(self.model, self.pool, self.sampler, columns, is_decode, normed=normed), normed


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
