"""Joins the reports of several benchmarks of one machine and commit into one file.

    python -m bench.merge OUT REPORT...

The parts are removed: every figure stands in one place. What OUT holds already stays if it is of the same commit and card;
a figure that was measured again is replaced.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from albatross.errors import ConfigError

Report = dict[str, Any]


def merge(out: Path, paths: Sequence[Path]) -> None:
    """Raises ConfigError if the parts are of several commits or cards; then all files are left as they are."""
    reports = [json.loads(path.read_text()) for path in paths]
    origins = {_origin(report) for report in reports}
    if len(origins) > 1:
        found = "; ".join(sorted(f"{commit} on {', '.join(cards) or 'no card'}" for commit, cards in origins))
        raise ConfigError(f"Reports that are joined must be of one commit and one machine; found {found}.")
    if out.is_file():
        existing = json.loads(out.read_text())
        reports = [existing, *reports] if _origin(existing) in origins else reports
    results = {row["name"]: row for report in reports for row in report["results"]}
    merged = {"machine": reports[-1]["machine"], "results": list(results.values())}
    out.write_text(json.dumps(merged, indent=1) + "\n")
    for path in paths:
        if path.resolve() != out.resolve():
            path.unlink()


def _origin(report: Report) -> tuple[str, tuple[str, ...]]:
    return report["machine"]["commit"], tuple(report["machine"]["gpus"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("reports", type=Path, nargs="+")
    args = parser.parse_args()
    merge(args.out, args.reports)


if __name__ == "__main__":
    main()
