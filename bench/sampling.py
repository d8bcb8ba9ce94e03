"""Times the sampling kernel on one CUDA card, in microseconds a step, beside one read of the logits at copy speed.

    python -m bench.sampling [--out FILE]

Each figure is the median of replays of one CUDA graph. The logits of a step come fresh from the head, so that a small batch finds
them in the L2 cache; the calls of one graph therefore share their logits, and the bound of few rows may be beaten.
"""

from dataclasses import replace

import torch

from albatross import ops
from albatross.ops.sampling import Field, Flag, SlotTables
from bench.cuda import DEVICE, open_card, time_graph
from bench.timing import Result, make_parser, write_report

VOCAB_SIZE = 65_536
ROWS = (1, 32, 256, 960)
NUM_CALLS = 8  # in a graph
SPREAD = 3.0  # of the logits, near that of a trained model
SEEN = 400  # ids a slot with penalties has drawn

# What differs from temperature 1 without limits, as fields of a record: float32 or int32.
KINDS: dict[str, tuple[Flag, dict[Field, float]]] = {
    "greedy": (Flag.GREEDY, {}),
    "plain": (Flag(0), {}),
    "top_p 0.3": (Flag.LIMITS, {Field.TOP_P: 0.3}),
    "top_k 50": (Flag.LIMITS, {Field.TOP_K: 50}),
    "top_p 0.5 and penalties": (
        Flag.LIMITS | Flag.PENALTIES,
        {Field.TOP_P: 0.5, Field.PRESENCE: 0.5, Field.FREQUENCY: 0.1, Field.DECAY: 0.99},
    ),
}


def make_tables(num_rows: int, flags: Flag, settings: dict[Field, float]) -> SlotTables:
    tables = SlotTables.allocate(num_rows, VOCAB_SIZE, torch.device(DEVICE))
    floats = tables.records.view(torch.float32)
    floats[:, [Field.TEMPERATURE, Field.TOP_P, Field.REPETITION, Field.DECAY]] = 1.0
    for field, value in settings.items():
        if field < Field.TOP_K:
            floats[:, field] = value
        else:
            tables.records[:, field] = int(value)
    tables.records[:, Field.FLAGS] = flags
    tables.records[:, Field.SEED_LOW] = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(num_rows, VOCAB_SIZE, device=DEVICE)
    counts.scatter_(1, torch.randint(VOCAB_SIZE, (num_rows, SEEN), device=DEVICE), 1.0)
    return replace(tables, counts=counts)


def bench_kind(name: str, num_rows: int, logits: torch.Tensor, bandwidth: float) -> Result:
    flags, settings = KINDS[name]
    tables = make_tables(num_rows, flags, settings)
    slots = torch.randperm(num_rows, device=DEVICE).int()
    drawn = torch.zeros(num_rows, dtype=torch.long, device=DEVICE)
    is_bad = torch.zeros(num_rows, dtype=torch.bool, device=DEVICE)
    measured = time_graph([lambda: ops.sample(logits, slots, tables, drawn, is_bad)] * NUM_CALLS)
    us = {"us_low": measured.low * 1e6, "us_high": measured.high * 1e6, "bytes": logits.nbytes}
    # A copy's bytes a second count what is read and what is written: reading alone is as fast.
    return Result(f"{name}, {num_rows} rows", measured.median * 1e6, "us", logits.nbytes / bandwidth * 1e6, us)


def main() -> None:
    args = make_parser(__doc__ or "").parse_args()
    bandwidth, results = open_card("bench.sampling")
    for num_rows in ROWS:
        logits = torch.randn(num_rows, VOCAB_SIZE, device=DEVICE) * SPREAD
        results += [bench_kind(name, num_rows, logits, bandwidth) for name in KINDS]
    write_report(results, args.out)


if __name__ == "__main__":
    main()
