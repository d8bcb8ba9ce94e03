"""What holds for the ops between the matrix products, whatever they compute: streams, cards, empty batches, what C++ refuses."""

import pytest
import torch
from tmix_cases import DECODE, OUTPUTS, PREFILL, PREPARE, READOUT, make_norm, make_shift, make_tmix
from wkv7_cases import make_pool

from albatross import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a CUDA build of torch"),
]

DEVICE = "cuda"
HEADS = 3
WIDTH = HEADS * 64
OPS = ("add_norm_mix", "add_norm", "tmix_decode", "tmix_prefill", "tmix_prepare", "tmix_readout", "squared_relu")
Arguments = dict[str, torch.Tensor | None]


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    ops.load_native(DEVICE)


def half(*shape: int, device: str = DEVICE) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16, device=device)


def arguments_of(op: str, num_tokens: int = 3, device: str = DEVICE) -> Arguments:
    """Sound arguments by name, in the order of the schema."""
    tensors = make_tmix(num_tokens, HEADS, torch.float16, device)
    rows = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
    out = {"out": half(num_tokens, WIDTH, device=device)}
    if op in ("add_norm_mix", "add_norm"):
        norm = make_norm(num_tokens, WIDTH, 6, torch.float16, device)
        if op == "add_norm":
            return {**{name: norm[name] for name in ("x", "delta", "ln_weight", "ln_bias")}, "index": rows[:-1].long(), **out}
        norm["shift"] = make_shift(num_tokens + 1, WIDTH, torch.float16, device)
        norm |= {"cu_seqlens": rows, "token_rows": rows[:-1].clone(), "slots": rows[:-1].clone()}
        return norm | {"x_out": torch.zeros_like(norm["x"]), "mixed": half(6, num_tokens, WIDTH, device=device)}
    if op == "tmix_decode":
        tensors |= {"state": make_pool(num_tokens + 1, HEADS, torch.float16, device), "slots": rows[:-1], **out}
        return {name: tensors[name] for name in DECODE}
    if op == "tmix_prefill":
        num_rows = min(num_tokens, 2)  # the first of one token, the second of all others
        tensors |= {"state": make_pool(num_tokens + 1, HEADS, torch.float16, device), "slots": rows[:num_rows].clone(), **out}
        bounds = [0, 1, num_tokens][: num_rows + 1]
        tensors["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
        segments = torch.zeros(4, HEADS, 2, 64, 64, device=device)
        return {name: tensors[name] for name in PREFILL} | {"segments": segments}
    if op == "tmix_prepare":
        return {name: tensors[name] for name in PREPARE} | {name: half(num_tokens, WIDTH, device=device) for name in OUTPUTS}
    if op == "tmix_readout":
        return {"y": tensors["v_first"], **{name: tensors[name] for name in ("r", "k", "v", "g", *READOUT)}, **out}
    return {"x": torch.linspace(-3, 300, num_tokens * WIDTH, device=device).half().view(num_tokens, WIDTH)}


def run(op: str, arguments: Arguments) -> list[torch.Tensor]:
    """Everything that may have been written."""
    getattr(ops, op)(*arguments.values())
    return [x for x in arguments.values() if x is not None]


def same(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_the_op_runs_on_the_current_stream_behind_what_is_queued_there(op: str) -> None:
    expected, arguments = run(op, arguments_of(op, 33)), arguments_of(op, 33)
    late = {name: None if x is None else torch.zeros_like(x) for name, x in arguments.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock ticks: long enough for an op on another stream to come first
        for name, x in arguments.items():
            if x is not None:
                late[name].copy_(x)
        results = run(op, late)
    stream.synchronize()
    assert same(results, expected)


@pytest.mark.parametrize("op", OPS)
def test_the_op_never_waits_for_the_device(op: str) -> None:
    arguments = arguments_of(op)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op, arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("op", OPS)
def test_an_empty_batch_is_no_error(op: str) -> None:
    before, arguments = list(arguments_of(op, 0).values()), arguments_of(op, 0)
    assert same(run(op, arguments), before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
@pytest.mark.parametrize("op", OPS)
def test_the_op_runs_on_the_tensors_card_whichever_is_current(op: str) -> None:
    results = [run(op, arguments_of(op, device=device)) for device in ("cuda:0", "cuda:1")]
    assert torch.cuda.current_device() == 0
    assert same(*results)


@pytest.mark.parametrize("op", OPS)
def test_opcheck_accepts_the_cuda_implementation(op: str) -> None:
    torch.library.opcheck(getattr(torch.ops.albatross, op).default, tuple(arguments_of(op).values()))


@pytest.mark.parametrize(
    ("op", "name", "words"),
    [
        ("tmix_decode", "k", r"k must be float16 \[T, C\] = \[3, 192\] on cuda:0, rows a multiple of 8 .*, found float32"),
        ("tmix_decode", "slots", r"slots must be contiguous int32 \[T\] = \[3\] on cuda:0, found float32"),
        ("tmix_prepare", "w0", r"w0 must be contiguous float32 \[C\] = \[192\] on cuda:0, found"),
        ("tmix_readout", "r_k", r"r_k must be contiguous float32 \[H, 64\] = \[3, 64\] on cuda:0, found"),
        ("add_norm_mix", "mixed", r"mixed must be contiguous float16 \[M, T, C\] = \[6, 3, 192\] on cuda:0, found"),
        ("add_norm_mix", "cu_seqlens", r"cu_seqlens must be contiguous int32 \[R \+ 1\] = \[4\] on cuda:0, found"),
        ("add_norm", "index", r"index must be contiguous int64 \[K\] = .* on cuda:0, found"),
        ("squared_relu", "x", "x must be contiguous float16 or float32, found float64"),
    ],
)
def test_a_wrong_argument_is_refused_by_op_name_expected_and_found(op: str, name: str, words: str) -> None:
    wrong = torch.zeros(5, 7, device=DEVICE, dtype=torch.float64 if op == "squared_relu" else torch.float32)
    with pytest.raises(RuntimeError, match=f"{op}: {words}"):
        run(op, arguments_of(op) | {name: wrong})


@pytest.mark.parametrize(("op", "name"), [("tmix_decode", "slots"), ("add_norm_mix", "shift"), ("add_norm", "ln_bias")])
def test_a_tensor_on_the_cpu_is_refused(op: str, name: str) -> None:
    arguments = arguments_of(op)
    with pytest.raises(RuntimeError, match=f"{op}: {name} must be .* on cuda:0.*, found .* on cpu"):
        run(op, arguments | {name: arguments[name].cpu()})


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("tmix_decode", "state"),
        ("tmix_decode", "v_first"),
        ("tmix_prepare", "b"),
        ("tmix_readout", "ln_bias"),
        ("add_norm_mix", "delta"),
        ("add_norm", "out"),
        ("squared_relu", "x"),
    ],
)
def test_a_view_that_begins_off_16_bytes_is_refused(op: str, name: str) -> None:
    arguments = arguments_of(op)
    x = arguments[name]
    memory = torch.zeros(x.untyped_storage().nbytes() // x.itemsize + 1, dtype=x.dtype, device=DEVICE)
    shifted = memory.as_strided(x.shape, x.stride(), 1)
    with pytest.raises(RuntimeError, match=f"{op}: {name} must begin at a multiple of 16 bytes, found an offset of [24] bytes"):
        run(op, arguments | {name: shifted})


def test_states_a_part_of_16_bytes_apart_are_refused() -> None:
    pool = half(4, HEADS * 64 * 64 + 1)[:, : HEADS * 64 * 64].unflatten(1, (HEADS, 64, 64))
    with pytest.raises(RuntimeError, match="tmix_decode: state must be strided by a multiple of 16 bytes"):
        run("tmix_decode", arguments_of("tmix_decode") | {"state": pool})


def test_add_norm_mix_refuses_to_write_over_its_input() -> None:
    arguments = arguments_of("add_norm_mix")
    with pytest.raises(RuntimeError, match="add_norm_mix: x_out must be another tensor than x"):
        run("add_norm_mix", arguments | {"x_out": arguments["x"]})


def test_more_channels_than_a_block_can_hold_are_refused() -> None:
    arguments = make_norm(1, 8256, 1, torch.float16, DEVICE)
    constants = (arguments["x"], None, arguments["ln_weight"], arguments["ln_bias"])
    with pytest.raises(RuntimeError, match="add_norm: x must be of at most 8192 channels, found"):
        ops.add_norm(*constants, torch.zeros(1, dtype=torch.long, device=DEVICE), half(1, 8256))
