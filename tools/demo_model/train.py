"""Trains `gosling`, the demo model, from nothing to a checkpoint on one CUDA card.

    python tools/demo_model/train.py --out DIR --minutes 9

Conversations are drawn by `tasks` in worker processes while the card trains; the wall-clock budget sets the schedule.
"""

import argparse
import logging
import math
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import tasks
import torch
from network import VOCAB_SIZE, Network, build_kernel
from torch import nn
from torch.nn import functional as F

from albatross.tokenizer.world import WorldTokenizer

LENGTH = 640  # tokens of a training row
WORKER_ROWS = 24
WORKERS = 13
PARTS = 4  # worker batches in a step: 96 rows
PROMPT_WEIGHT = 0.05  # of a question's tokens in the loss; an answer's tokens count 1
PEAK_RATE, FLOOR, WARMUP_STEPS = 1.5e-3, 0.02, 200

log = logging.getLogger("train")


def draw_document(tokenizer: WorldTokenizer, g: random.Random) -> tuple[list[int], list[float]]:
    """One conversation as ids and loss weights. Answers begin on a token boundary, as they do when they are generated."""
    text, spans = tasks.render(tasks.sample(g))
    ids: list[int] = []
    weights: list[float] = []
    end = 0
    for start, stop in spans:
        for piece, weight in ((text[end:start], PROMPT_WEIGHT), (text[start:stop], 1.0)):
            piece_ids = tokenizer.encode(piece)
            ids += piece_ids
            weights += [weight] * len(piece_ids)
        end = stop
    return ids, weights


def draw_batches(seed: int, queue: Any) -> None:
    """Fills `queue` with rows of documents, with id 0 between them, for ever."""
    tokenizer, g = WorldTokenizer(VOCAB_SIZE), random.Random(seed)
    while True:
        ids = np.zeros((WORKER_ROWS, LENGTH + 1), np.int64)
        weights = np.zeros((WORKER_ROWS, LENGTH + 1), np.float32)
        for row in range(WORKER_ROWS):
            row_ids, row_weights = ([0], [0.0]) if g.random() < 0.5 else ([], [])
            while len(row_ids) <= LENGTH:
                document_ids, document_weights = draw_document(tokenizer, g)
                row_ids += [*document_ids, 0]
                row_weights += [*document_weights, 1.0]
            ids[row], weights[row] = row_ids[: LENGTH + 1], row_weights[: LENGTH + 1]
        queue.put((ids, weights))


@torch.no_grad()
def evaluate(network: Network, tokenizer: WorldTokenizer, questions: int, seed: int = 7) -> dict[str, float]:
    """Share of answers given right, token for token, by task. Teacher-forced, which is greedy where every token is right."""
    g, scores = random.Random(seed), {}
    for task in tasks.EVAL_TASKS:
        items: list[tuple[list[int], list[int]]] = []
        while len(items) < questions:
            turns = task(g)
            text, _ = tasks.render([*turns[:-1], ("Assistant", "")])
            prompt = tokenizer.encode(text.rstrip(" \n"))
            answer = tokenizer.encode(" " + turns[-1][1] + "\n\n")
            if len(prompt) + len(answer) < LENGTH:
                items.append((prompt, answer))
        ids = torch.zeros(questions, LENGTH, dtype=torch.long)
        for row, (prompt, answer) in enumerate(items):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        with torch.autocast("cuda", torch.bfloat16):
            best = network(ids.cuda()).float().argmax(-1).cpu()
        right = [best[row, len(p) - 1 : len(p) + len(a) - 1].tolist() == a for row, (p, a) in enumerate(items)]
        scores[task.__name__] = sum(right) / questions
    return scores


def make_optimizer(network: Network) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only, and twice the learning rate on the decays w0."""
    matrices: list[nn.Parameter] = []
    decays: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2 and "weight" in name and "emb" not in name:
            matrices.append(parameter)
        else:
            (decays if name.endswith("att.w0") else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": 0.05, "rate": 1.0},
        {"params": decays, "weight_decay": 0.0, "rate": 2.0},
        {"params": others, "weight_decay": 0.0, "rate": 1.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), eps=1e-16, fused=True)


def step_loss(network: Network, parts: list[tuple[Any, Any]]) -> torch.Tensor:
    """Mean cross-entropy of the next token, weighted."""
    ids = torch.from_numpy(np.concatenate([ids for ids, _ in parts])).cuda(non_blocking=True)
    weights = torch.from_numpy(np.concatenate([weights for _, weights in parts])).cuda(non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16):
        logits = network(ids[:, :-1])
    losses = F.cross_entropy(logits.float().view(-1, VOCAB_SIZE), ids[:, 1:].reshape(-1), reduction="none")
    return (losses * weights[:, 1:].reshape(-1)).sum() / weights[:, 1:].sum()


def train(network: Network, tokenizer: WorldTokenizer, queue: Any, seconds: float) -> None:
    optimizer, start, step = make_optimizer(network), time.monotonic(), 0
    while (spent := time.monotonic() - start) < seconds:
        cosine = 0.5 * (1 + math.cos(math.pi * spent / seconds))
        rate = PEAK_RATE * min(1, (step + 1) / WARMUP_STEPS) * (FLOOR + (1 - FLOOR) * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        loss = step_loss(network, [queue.get() for _ in range(PARTS)])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            log.info("step %d, %.0f s, loss %.4f, %d batches waiting", step, spent, loss.item(), queue.qsize())
        if step % 1000 == 0:
            log_scores(evaluate(network, tokenizer, 16))


def log_scores(scores: dict[str, float]) -> None:
    by_task = " ".join(f"{task}={score:.2f}" for task, score in scores.items())
    log.info("%s mean=%.4f", by_task, sum(scores.values()) / len(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gosling.pth")
    parser.add_argument("--minutes", type=float, default=9, help="training time")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    context = multiprocessing.get_context("fork")
    queue = context.Queue(64)
    workers = [context.Process(target=draw_batches, args=(1000 + i, queue), daemon=True) for i in range(WORKERS)]
    for worker in workers:
        worker.start()
    build_kernel()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(1)
    network, tokenizer = Network().cuda(), WorldTokenizer(VOCAB_SIZE)
    train(network, tokenizer, queue, arguments.minutes * 60)
    log_scores(evaluate(network, tokenizer, 64))
    arguments.out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16).cpu() for name, tensor in network.state_dict().items()}
    torch.save(weights, arguments.out / "gosling.pth")
    for worker in workers:
        worker.terminate()


if __name__ == "__main__":
    main()
