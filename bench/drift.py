"""What the type of the recurrent state does over long contexts, against float64: errors, loss and recall.

    python -m bench.drift [--device cuda] [--length 32768] [--out FILE]

Three parts. `recurrence`: the recurrence alone, on random vectors at three strengths of decay. `text`: the demo model over one
long text, made of its evaluation conversations. `recall`: numbers told to the demo model and asked for after other
conversations. Everything is fed one token a step, as in decoding, so that a state is rounded after every token.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from albatross import ops
from albatross.config import EngineConfig
from albatross.engine.model_runner import resolve_backend, resolve_device
from albatross.models.checkpoint import open_checkpoint
from albatross.models.rwkv7 import RWKV7, load_model
from albatross.reference import rwkv7 as oracle
from albatross.reference import wkv7 as reference
from albatross.tokenizer.world import WorldTokenizer
from bench.stepper import CHUNK, Stepper
from bench.timing import ROOT, Result, make_parser, write_report
from bench.vectors import Vectors, random_vectors

CONVERSATIONS = ROOT / "tests" / "data" / "eval-11.jsonl"
TYPES = (("float32", "float32"), ("float32", "float16"), ("float16", "float32"), ("float16", "float16"))  # weights, state
DECAYS = {"strong": -0.5, "weak": -5.0, "nearly none": -10.0}  # mean logit: factors of about 0.79, 0.996 and 0.99997 a token
NUM_HEADS = 16
NUM_PARTS = 4  # quarters of a length, each reported by itself
NUM_ROWS, DISTANCES, NUM_FACTS = 48, (16, 64, 256, 1024, 4096, 16384), 3
ANSWER_TOKENS = 6
NOT_FILLER = ("recall", "name_memory", "shout", "tool", "think")  # would tell other facts, or rules for what follows


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def as_result(name: str, unit: str, columns: Sequence[int], values: Sequence[float], heading: str) -> Result:
    """The last value is the figure; all stand in the details, under the columns of the table `heading` names."""
    return Result(name, values[-1], unit, details={"table": heading, "columns": list(columns), "values": list(values)})


def ends_of_parts(length: int) -> list[int]:
    return [length * part // NUM_PARTS for part in range(1, NUM_PARTS + 1)]


def recurrence(device: torch.device, length: int) -> list[Result]:
    """Errors of the state at the end of each part, and of y over it, by decay and type of state."""
    results = []
    ends = ends_of_parts(length)
    for name, logit in DECAYS.items():
        found = _recurrence_errors(device, ends, logit)
        for (dtype, what), values in found.items():
            title = f"recurrence, {name} decay, {dtype} state: {what}"
            results.append(as_result(title, "relative error", ends, values, "error after tokens"))
    return results


def _recurrence_errors(device: torch.device, ends: list[int], decay_logit: float) -> dict[tuple[str, str], list[float]]:
    generator = torch.Generator(device=device).manual_seed(1)
    one, slot = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 1], [0]))
    exact = torch.zeros(1, NUM_HEADS, 64, 64, dtype=torch.float64, device=device)
    states = {name: exact.to(dtype) for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16))}
    errors: dict[tuple[str, str], list[float]] = {}
    begin = 0
    for end in ends:
        squares = {name: torch.zeros(2, dtype=torch.float64, device=device) for name in states}
        for start in range(begin, end, CHUNK):
            vectors = random_vectors(min(CHUNK, end - start), NUM_HEADS, device, decay_logit, generator)
            expected = torch.empty(vectors[0].shape, dtype=torch.float64, device=device)
            reference.wkv7_prefill(exact, *vectors, cu_seqlens=one * len(expected), slots=slot, y=expected)
            for name, state in states.items():
                y = _step_by_step(state, vectors, one, slot)
                squares[name] += torch.stack(((y.double() - expected).square().sum(), expected.square().sum()))
        for name, state in states.items():
            errors.setdefault((name, "state"), []).append(relative_error(state, exact))
            errors.setdefault((name, "y"), []).append(float((squares[name][0] / squares[name][1]).sqrt()))
        begin = end
    return errors


def _step_by_step(state: Tensor, vectors: Vectors, cu_seqlens: Tensor, slots: Tensor) -> Tensor:
    """y of every token, each fed by itself."""
    kernel = ops if state.is_cuda else reference
    y = torch.empty_like(vectors[0])
    for t in range(len(y)):
        token = (vector[t : t + 1] for vector in vectors)
        kernel.wkv7_prefill(state, *token, cu_seqlens=cu_seqlens, slots=slots, y=y[t : t + 1])
    return y


def load_conversations() -> list[dict[str, str]]:
    return [json.loads(line) for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines()]


def long_text(tokenizer: WorldTokenizer, length: int) -> list[int]:
    """One more than `length` ids: conversations in random order with id 0 between them, as in training."""
    generator, ids = random.Random(1), [0]
    while len(ids) <= length:
        for row in generator.sample(load_conversations(), 480):
            ids += [*tokenizer.encode(f"{row['prompt']} {row['answer']}\n\n"), 0]
    return ids[: length + 1]


def text(models: dict[str, RWKV7], length: int) -> list[Result]:
    """Errors of state (of the worst layer) and logits by part of one long text, and the mean loss, float64's beside them."""
    path = EngineConfig().model_path
    device = next(iter(models.values())).device
    weights = {name: tensor.to(device).double() for name, tensor in open_checkpoint(path).tensors.items()}
    ids = long_text(WorldTokenizer(len(weights["emb.weight"])), length)
    steppers = {name: Stepper(model, 1, 1) for name, model in models.items()}
    ends, begin = ends_of_parts(length), 0
    state = oracle.zero_state(weights)
    found: dict[tuple[str, str], list[float]] = {}
    for end in ends:
        losses = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("float64", *steppers)}
        squares = {name: torch.zeros(2, dtype=torch.float64, device=device) for name in steppers}
        for start in range(begin, end, CHUNK):
            chunk = ids[start : min(start + CHUNK, end) + 1]
            targets = torch.tensor(chunk[1:], device=device)
            expected, state = oracle.forward(weights, torch.tensor(chunk[:-1], device=device), state)
            losses["float64"] += _loss(expected, targets)
            for name, stepper in steppers.items():
                logits = torch.cat([logits.clone() for logits in stepper.read([chunk[:-1]], [0])]).double()
                losses[name] += _loss(logits, targets)
                squares[name] += torch.stack(((logits - expected).square().sum(), expected.square().sum()))
        for name, loss in losses.items():
            found.setdefault((name, "loss"), []).append(float(loss) / (end - begin))
        for name, stepper in steppers.items():
            wkv, _ = stepper.pool.read(0)
            worst = max(relative_error(layer, exact) for layer, exact in zip(wkv, state.wkv, strict=True))
            found.setdefault((name, "state"), []).append(worst)
            found.setdefault((name, "logits"), []).append(float((squares[name][0] / squares[name][1]).sqrt()))
        begin = end
    units = {"loss": "nats a token", "state": "relative error", "logits": "relative error"}
    headings = {"loss": "mean loss up to token", "state": "error after tokens", "logits": "error after tokens"}
    return [
        as_result(f"text, {name}: {what}", units[what], ends, values, headings[what])
        for what in units
        for (name, kind), values in found.items()
        if kind == what
    ]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


class Dialogue:
    """One row of the recall test: facts, then conversations about other things without end, then a question."""

    def __init__(self, seed: int, tokenizer: WorldTokenizer, conversations: Sequence[dict[str, str]]) -> None:
        self._generator, self._tokenizer = random.Random(seed), tokenizer
        self._filler = [row for row in conversations if row["task"] not in NOT_FILLER]
        told = [row["prompt"] for row in conversations if row["task"] == "recall"]
        words = sorted({word for prompt in told for word in re.findall(r"(\w+)=\d+", prompt)})
        facts = {word: self._generator.randrange(10, 100) for word in self._generator.sample(words, NUM_FACTS)}
        listed = ", ".join(f"{word}={number}" for word, number in facts.items())
        asked = self._generator.choice(sorted(facts))
        self.facts = tokenizer.encode(f"User: Remember: {listed}.\n\nAssistant: I will remember.\n\n")
        self.question = tokenizer.encode(f"User: What is {asked}?\n\nAssistant:")
        self.answer = str(facts[asked])

    def chatter(self, num_tokens: int) -> list[int]:
        """Whole conversations of at least so many tokens."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            row = self._generator.choice(self._filler)
            ids += self._tokenizer.encode(f"{row['prompt']} {row['answer']}\n\n")
        return ids


def recall(models: dict[str, RWKV7], distances: Sequence[int], num_rows: int) -> list[Result]:
    """The share of numbers that the model still tells right after so many tokens of other conversations."""
    results = []
    for name, model in models.items():
        shares = _recall_shares(model, distances, num_rows)
        results.append(as_result(f"recall, {name}", "% right", distances, shares, "recall after tokens"))
    return results


def _recall_shares(model: RWKV7, distances: Sequence[int], num_rows: int) -> list[float]:
    tokenizer = WorldTokenizer(model.config.vocab_size)
    conversations = load_conversations()
    rows = [Dialogue(seed, tokenizer, conversations) for seed in range(num_rows)]
    told = list(range(num_rows))
    forks = [num_rows + slot for slot in told]
    stepper = Stepper(model, num_rows, 2 * num_rows)
    _read(stepper, [row.facts for row in rows], told)
    shares, before = [], 0
    for distance in distances:
        _read(stepper, [row.chatter(distance - before) for row in rows], told)
        before = distance
        for slot, fork in zip(told, forks, strict=True):
            stepper.pool.copy(slot, [fork])
        answers = _answers(stepper, [row.question for row in rows], forks)
        texts = [tokenizer.decode(ids).partition("\n")[0].strip() for ids in answers]
        num_right = sum(text == row.answer for text, row in zip(texts, rows, strict=True))
        shares.append(100 * num_right / num_rows)
    return shares


def _read(stepper: Stepper, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> list[Tensor]:
    """Each row's logits after its last token."""
    last: list[Tensor | None] = [None] * len(rows)
    for number, logits in enumerate(stepper.read(rows, slots), start=1):
        for index in (index for index, row in enumerate(rows) if len(row) == number):
            last[index] = logits[index].clone()
    return [logits for logits in last if logits is not None]


def _answers(stepper: Stepper, questions: Sequence[Sequence[int]], slots: Sequence[int]) -> list[list[int]]:
    """The likeliest ids after each question."""
    logits = _read(stepper, questions, slots)
    answers: list[list[int]] = [[] for _ in questions]
    for _ in range(ANSWER_TOKENS):
        drawn: list[int] = torch.stack(logits).argmax(-1).tolist()
        for answer, token in zip(answers, drawn, strict=True):
            answer.append(token)
        logits = _read(stepper, [[token] for token in drawn], slots)
    return answers


def load_models(device: str) -> dict[str, RWKV7]:
    """The demo model in each of TYPES."""
    path, backend = EngineConfig().model_path, resolve_backend("auto", device)
    return {
        f"{_short(dtype)} weights, {_short(state_dtype)} state": load_model(
            path, device=device, dtype=dtype, state_dtype=state_dtype, backend=backend
        )
        for dtype, state_dtype in TYPES
    }


def _short(dtype: str) -> str:
    return dtype.replace("float", "fp")


def measure(args: argparse.Namespace) -> list[Result]:
    device = resolve_device(args.device)
    models = load_models(device)
    distances = [distance for distance in DISTANCES if distance <= args.length]
    return [
        *recurrence(next(iter(models.values())).device, args.length),
        *text(models, args.length),
        *recall(models, distances, args.rows),
    ]


def main() -> None:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, default=32768, help="tokens of the recurrence and of the text")
    parser.add_argument("--rows", type=int, default=NUM_ROWS, help="dialogues of the recall test")
    args = parser.parse_args()
    write_report(measure(args), args.out)


if __name__ == "__main__":
    main()
