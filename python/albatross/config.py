"""All settings, their defaults, bounds and meaning: the one schema behind flags, environment variables and the docs.

Every field of `EngineConfig` and `ServerConfig` can be given as a keyword, as a flag of `albatross serve`, or as an
environment variable `ALBATROSS_<FIELD>`; the first of these that is set wins. `ModelConfig` and `ModelProfile` describe
one checkpoint: the first is read from its tensors, the second from the JSON file beside it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from albatross.constants import HEAD_SIZE
from albatross.errors import ConfigError

DEMO_MODEL = "demo"  # the model path that stands for the checkpoint inside the package
SYNTHETIC_PREFIX = "synth:"  # before a size: the model path that stands for random weights of that size, made at the start
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
RunAhead = Annotated[Literal["auto", "0", "1"], BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of one RWKV-7 checkpoint, all derived from tensor shapes."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    w_rank: int
    a_rank: int
    v_rank: int
    g_rank: int

    @property
    def num_heads(self) -> int:
        return self.hidden_size // HEAD_SIZE

    @property
    def state_numel(self) -> int:
        """Numbers in one sequence's state: the wkv matrices and the two shift rows of every layer."""
        return self.num_layers * self.hidden_size * (HEAD_SIZE + 2)


class ModelProfile(BaseModel):
    """How a checkpoint wants to be spoken to: defaults a client may override. Read from `<checkpoint>.json` if it exists.

    The defaults are those of the RWKV-7 G1 models, from their authors' published templates and model card.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    chat_stop: tuple[str, ...] = ("\n\nUser:", "\n\nSystem:", "\nUser:")
    chat_sampling: dict[str, float] = {
        "temperature": 1.0,
        "top_p": 0.5,
        "presence_penalty": 2.0,
        "frequency_penalty": 0.1,
        "penalty_decay": 0.99,
    }


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ALBATROSS_", frozen=True, extra="forbid", protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_sentence(error)) from None


class EngineConfig(_Settings):
    """Settings of the engine: which model, where it runs, and its limits."""

    model: str = Field(
        DEMO_MODEL,
        description="Checkpoint (.pth or .safetensors), 'demo' for the model inside the package, or for benchmarks 'synth:SIZE' "
        "(such as synth:7.2b) for random weights of a released model's shape.",
    )
    device: Device = Field("auto", description="auto, cpu, cuda or cuda:N. auto takes the first CUDA card, else the CPU.")
    dtype: Literal["auto", "float16", "float32"] = Field(
        "auto", description="Type of weights and activations. auto: float16 on CUDA, float32 on the CPU."
    )
    state_dtype: Literal["auto", "float16", "float32"] = Field(
        "auto", description="Type of the wkv states. auto: that of the weights."
    )
    backend: Literal["auto", "native", "reference"] = Field(
        "auto", description="Whose kernels run the model and draw. auto: the native library's on CUDA, plain torch's on the CPU."
    )
    cuda_graphs: bool = Field(True, description="On CUDA with the native backend, run steps as captured graphs.")
    autotune: bool = Field(
        True, description="On CUDA with the native backend, measure once a card which kernels are the quickest, and remember it."
    )
    run_ahead: RunAhead = Field(
        "auto",
        description="Steps given to the device before the results of the one it runs are read. auto: 1 on CUDA, 0 on the CPU.",
    )
    workers: int = Field(
        1,
        ge=1,
        description="Engine processes of serve and batch, each with the whole model: on CUDA worker i runs on cuda:i (use "
        "CUDA_VISIBLE_DEVICES to choose the cards), else all run on the CPU. A request goes to the least busy one.",
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Sequences that run at once in a worker: slots of its state pool.")
    max_num_batched_tokens: int = Field(
        0, ge=0, le=1 << 20,
        description="Tokens of one step of a worker: decode rows and prompt chunks. 0: 4096 on CUDA, 256 on the CPU.",
    )
    prefill_pace: float = Field(
        4.0, ge=0,
        description="How many times as long as a step of the running sequences alone one may take that reads prompts as well, by "
        "measured times. 0: prompts take all of max_num_batched_tokens, however long, and steps do not depend on times.",
    )
    max_queued_requests: int = Field(
        1024, ge=0, description="Waiting requests, for each worker, beyond which the next one is refused (429)."
    )
    max_queued_tokens: int = Field(
        1 << 22, ge=0, description="Waiting prompt tokens, for each worker, beyond which the next request is refused."
    )
    max_prompt_tokens: int = Field(131072, ge=1, description="Longest prompt in tokens; a guard against cost, not a model limit.")
    max_output_tokens: int = Field(
        32768, ge=1, description="Longest answer in tokens, and the length where max_tokens is absent."
    )
    max_num_choices: int = Field(128, ge=1, description="Most choices (prompts times n) of one request.")
    num_threads: int = Field(
        0, ge=0, description="CPU threads of each worker; 0 takes torch's number, which several workers on the CPU share."
    )
    start_timeout_s: float = Field(300, gt=0, description="Seconds an engine process may take to load the model.")
    stall_timeout_s: float = Field(60, gt=0, description="Seconds without a sign of life after which an engine is restarted.")

    @model_validator(mode="after")
    def _workers_have_cards_of_their_own(self) -> "EngineConfig":
        if self.workers > 1 and self.device.startswith("cuda:"):
            raise ValueError(
                f"workers is {self.workers}, but device names one card ({self.device}); use cuda, and choose the cards by "
                "CUDA_VISIBLE_DEVICES"
            )
        return self

    @model_validator(mode="after")
    def _budget_covers_decoding(self) -> "EngineConfig":
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}), "
                "so that every running sequence can decode in each step"
            )
        return self

    def token_budget(self, device_type: str) -> int:
        """Tokens of one step on a device of this type ('cpu' or 'cuda')."""
        chosen = self.max_num_batched_tokens or (4096 if device_type == "cuda" else 256)
        return max(chosen, self.max_num_seqs)

    def steps_ahead(self, device_type: str) -> int:
        """`run_ahead` on a device of this type ('cpu' or 'cuda')."""
        return int(device_type == "cuda") if self.run_ahead == "auto" else int(self.run_ahead)

    @property
    def model_path(self) -> Path:
        if self.model == DEMO_MODEL:
            return Path(__file__).parent / "demo" / "gosling.pth"
        return Path(self.model).expanduser()

    @property
    def model_name(self) -> str:
        return self.model if self.model.startswith(SYNTHETIC_PREFIX) else self.model_path.stem

    def load_profile(self) -> ModelProfile:
        """The profile beside the checkpoint, or the defaults. Raises ConfigError if the file is not a valid profile."""
        path = self.model_path.with_suffix(".json")
        if not path.is_file():
            return ModelProfile()
        try:
            return ModelProfile.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(f"{path} is not a model profile: {_sentence(error)}") from None


class ServerConfig(_Settings):
    """Settings of the HTTP server."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    uds: str | None = Field(None, description="Unix socket to listen on instead of host and port.")
    root_path: str = Field("", description="Path prefix under which a proxy serves this server.")
    served_model_name: str | None = Field(None, description="Name in /v1/models and answers; default: the file's stem.")
    max_body_bytes: int = Field(32 << 20, ge=1024, description="Largest request body (413 beyond it).")
    drain_timeout_s: float = Field(30, ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    keep_alive_s: float = Field(10, gt=0, description="Seconds of silence after which a stream gets an SSE comment.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")
    log_format: Literal["console", "json"] = Field("console", description="Log lines for people or for machines.")


def _sentence(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        found = "" if item["type"] == "missing" or not where else f", but is {item['input']!r}"
        parts.append(f"{where + ': ' if where else ''}{item['msg'].removeprefix('Value error, ')}{found}")
    return "; ".join(parts) + "."
