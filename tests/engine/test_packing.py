"""How a step's rows become one batch of tokens, what padding adds, and that the model and the draws see nothing of it."""

from array import array

import torch

from albatross.config import EngineConfig
from albatross.engine.graphs import mixed_step
from albatross.engine.messages import AddRequest, pack_ids
from albatross.engine.model_runner import ModelRunner
from albatross.engine.packing import NOTHING, PADDING_SLOT, Packed, pack
from albatross.engine.request import Request
from albatross.engine.scheduler import Chunk, Step
from albatross.sampling_params import SamplingParams


def request(slots: list[int], prompt: list[int]) -> Request:
    made = Request.from_message(AddRequest(tuple(slots), pack_ids(prompt), SamplingParams(temperature=0)), 100)
    for stream, slot in zip(made.streams, slots, strict=True):
        stream.slot = slot
    return made


def step_of(decoding: list[int], chunks: list[tuple[list[int], list[int], bool]]) -> Step:
    """decoding: slots; chunks: slots of a request's choices, tokens, and whether they are the prompt's last."""
    draws = [(made.streams[0], made) for made in (request([slot], [1]) for slot in decoding)]
    step = Step(draws=draws, num_decoding=len(decoding))
    for slots, tokens, is_last in chunks:
        made = request(slots, tokens)
        samples = made.streams if is_last else []
        step.chunks.append(Chunk(made, slots[0], array("I", tokens), samples, is_last))
        step.draws += [(stream, made) for stream in samples]
    return step


def test_decoding_rows_name_their_slot_and_chunks_bring_their_tokens() -> None:
    packed = pack(step_of([4, 0], [([2], [7, 8, 9], False), ([5, 1], [3, 6], True)]))
    expected = Packed(array("i", [-5, -1, 7, 8, 9, 3, 6]), [0, 1, 2, 5, 7], [4, 0, 2, 5], [0, 1, 6, 6], [4, 0, 5, 1])
    assert packed == expected


def test_padding_adds_tokens_of_no_row_rows_of_no_token_and_draws_of_no_slot() -> None:
    packed = pack(step_of([3], [([1], [7, 8], True)])).padded(6, 4)
    assert packed == Packed(array("i", [-4, 7, 8, 0, 0, 0]), [0, 1, 3, 3, 3], [3, 1, -1, -1], [0, 2, 0, 0], [3, 1, -1, -1])
    assert NOTHING.padded(2, 1) == Packed(array("i", [0, 0]), [0, 0], [PADDING_SLOT], [0], [PADDING_SLOT])


def test_a_padded_step_draws_and_keeps_what_the_step_itself_does() -> None:
    packed = pack(step_of([3, 0], [([1], [700, 800, 900], True), ([5, 6], [30], True), ([2], [9, 9], False)]))
    found = []
    for each in (packed, packed.padded(16, 8)):
        runner = ModelRunner(EngineConfig(device="cpu", num_threads=1, max_num_seqs=8))
        generator = torch.Generator().manual_seed(1)
        runner.pool.wkv.normal_(generator=generator).mul_(0.1)
        runner.pool.shift.normal_(generator=generator)
        runner.sampler.last_token.copy_(torch.arange(100, 108))
        before = runner.pool.wkv.clone()
        columns = [torch.tensor(column, dtype=torch.int32) for column in each]
        with torch.inference_mode():
            normed = runner.model.new_normed(len(each.tokens))
            logits = mixed_step(runner.model, runner.pool, runner.sampler, columns, is_decode=False, normed=normed)
        kept = (runner.pool.wkv, runner.sampler.last_token, runner.sampler.position, normed[: len(packed.tokens)])
        found.append((logits[: len(packed.draws)], *kept))
        assert torch.equal(runner.pool.wkv[[4, 6, 7]], before[[4, 6, 7]])
        assert not torch.equal(runner.pool.wkv[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])
    plain, padded = found
    torch.testing.assert_close(plain[0], padded[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain[1], padded[1], rtol=1e-4, atol=1e-5)
    assert plain[2].tolist() == padded[2].tolist()
    assert plain[3].tolist() == padded[3].tolist() == [1, 1, 0, 1, 0, 1, 1, 0]
    torch.testing.assert_close(plain[4], padded[4], rtol=1e-4, atol=1e-4)
