"""The sampler on a CUDA card: it draws what it draws on the CPU, and waits for the card nowhere but where it says so."""

from array import array
from collections.abc import Iterator

import pytest
import torch

from albatross.engine.request import Request, Stream
from albatross.engine.sampler import Sampler, Samples
from albatross.sampling_params import SamplingParams

V = 4096
NUM_STEPS = 12
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, logprobs=3),
    SamplingParams(top_p=0.4, logprobs=0),
    SamplingParams(top_k=30, min_p=0.01, temperature=1.4),
    SamplingParams(top_p=0.6, presence_penalty=1.0, frequency_penalty=0.2, penalty_decay=0.9),
    SamplingParams(repetition_penalty=1.5, penalize_prompt=True, logprobs=20),
    SamplingParams(logit_bias={5: 8.0, 70: -100.0}, banned_token_ids=(5, 9), min_tokens=4, stop_token_ids=(11,)),
    SamplingParams(top_p=0.7, temperature=0.5, sampler_order="rwkv-classic"),
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card is visible to torch"),
]


@pytest.fixture
def _default_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_sampler(device: str, backend: str) -> Sampler:
    sampler = Sampler(len(PARAMS), V, torch.device(device), backend)
    sampler.forbid([0, V - 1])
    for slot, params in enumerate(PARAMS):
        sampler.assign(Request([Stream(slot, slot, slot=slot)], array("I", (5, 5, 7)), params, 40 + slot, 100, 0))
    return sampler


def steps() -> torch.Tensor:
    return torch.randn(NUM_STEPS, len(PARAMS), V, generator=torch.Generator().manual_seed(0)) * 3


def run(sampler: Sampler, logits: torch.Tensor) -> list[Samples]:
    slots = list(range(len(PARAMS)))
    slots_there = torch.tensor(slots, dtype=torch.int32, device=logits.device)
    pending = []
    for step in logits:
        sampler.draw(step, slots_there)
        pending.append(sampler.collect(step, slots))
    return [each.wait() for each in pending]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_card_draws_what_the_cpu_draws(backend: str) -> None:
    logits = steps()
    expected = run(make_sampler("cpu", "reference"), logits)
    found = run(make_sampler("cuda", backend), logits.cuda())
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours.logprobs) == list(theirs.logprobs) == [1, 2, 5]
        for row, each in ours.logprobs.items():
            assert each.top_ids == theirs.logprobs[row].top_ids
            assert each.logprob == pytest.approx(theirs.logprobs[row].logprob, abs=1e-4)


@pytest.mark.usefixtures("_default_sync_mode")
def test_assigning_drawing_and_collecting_wait_for_nothing() -> None:
    logits = steps().cuda()
    slots = torch.arange(len(PARAMS), dtype=torch.int32, device="cuda")
    sampler = make_sampler("cuda", "native")
    run(sampler, logits)  # the first use of a kernel or of pinned memory may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # of any wait that torch makes by itself
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    for slot, params in enumerate(PARAMS):
        sampler.assign(Request([Stream(slot, slot, slot=slot)], array("I", (5, 5, 7)), params, 40 + slot, 100, 0))
    sampler.draw(logits[0], slots)
    pending = sampler.collect(logits[0], list(range(len(PARAMS))))
    assert not busy.query()
    torch.cuda.set_sync_debug_mode("default")
    assert pending.wait().token_ids == run(make_sampler("cpu", "reference"), logits[:1].cpu())[0].token_ids
