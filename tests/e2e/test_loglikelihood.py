"""Scoring as evaluation harnesses ask for it: contexts and continuations as token ids, echoed with log-probabilities."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch
from server_process import ServerProcess

from albatross.reference import rwkv7 as reference
from albatross.tokenizer.world import WorldTokenizer

VOCAB_SIZE = 4096
BATCH = 16
TOLERANCE = 0.05 if torch.cuda.is_available() else 1e-3  # of a sum over a continuation, in float16 or float32
Pair = tuple[list[int], list[int]]  # context, continuation


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=120)


def split(row: dict[str, Any], answer: str) -> Pair:
    tokenizer = WorldTokenizer(VOCAB_SIZE)
    context = tokenizer.encode(row["prompt"])
    whole = tokenizer.encode(f"{row['prompt']} {answer}")
    assert whole[: len(context)] == context
    return context, whole[len(context) :]


def loglikelihoods(client: httpx.Client, pairs: Sequence[Pair], max_tokens: int) -> list[tuple[float, bool]]:
    """The sum over each continuation, and whether it is the greedy one."""
    found: list[tuple[float, bool]] = []
    for start in range(0, len(pairs), BATCH):
        batch = pairs[start : start + BATCH]
        body = {
            "prompt": [context + continuation for context, continuation in batch], "model": "gosling", "temperature": 0,
            "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True,
        }  # fmt: skip
        response = client.post("/v1/completions", json=body)
        response.raise_for_status()
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        found += [_parse(choice["logprobs"], *pair) for choice, pair in zip(choices, batch, strict=True)]
    return found


def _parse(logprobs: dict[str, list[Any]], context: list[int], continuation: list[int]) -> tuple[float, bool]:
    place = slice(len(context), len(context) + len(continuation))
    values, tops = logprobs["token_logprobs"][place], logprobs["top_logprobs"][place]
    assert len(values) == len(continuation)
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


def expected_of(weights: dict[str, torch.Tensor], context: list[int], continuation: list[int]) -> float:
    ids = torch.tensor(context + continuation)
    logits, _ = reference.forward(weights, ids, reference.zero_state(weights))
    rows = logits[len(context) - 1 : -1].log_softmax(-1)
    return float(rows.gather(1, ids[len(context) :, None]).sum())


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_continuation_has_the_loglikelihood_of_the_float64_reference(
    client: httpx.Client, evaluation: list[dict[str, Any]], demo_path: Any, max_tokens: int
) -> None:
    """Of every 24th question the right answer, and the answer of the question before it."""
    rows = evaluation[::24]
    pairs = [split(row, answer["reference"]) for i, row in enumerate(rows) for answer in (row, rows[i - 1])]
    weights = {name: tensor.double() for name, tensor in torch.load(demo_path, weights_only=True).items()}
    found = loglikelihoods(client, pairs, max_tokens)
    for pair, (loglikelihood, _) in zip(pairs, found, strict=True):
        assert loglikelihood == pytest.approx(expected_of(weights, *pair), abs=TOLERANCE)
    right, wrong = found[::2], found[1::2]
    assert all(is_greedy for _, is_greedy in right)
    assert not any(is_greedy for _, is_greedy in wrong)
    assert all(one > other for (one, _), (other, _) in zip(right, wrong, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_reference_answer_is_the_greedy_continuation(client: httpx.Client, evaluation: list[dict[str, Any]]) -> None:
    pairs = [split(row, row["reference"]) for row in evaluation]
    found = loglikelihoods(client, pairs, 1)
    wrong = [row["prompt"] for row, (_, is_greedy) in zip(evaluation, found, strict=True) if not is_greedy]
    assert not wrong[:3]
    assert len(found) == 480
