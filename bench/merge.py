"""Joins the reports of several benchmarks of one machine into one file.

    python -m bench.merge OUT REPORT...

The parts are removed: every figure stands in one place.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("reports", type=Path, nargs="+")
    args = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in args.reports]
    merged = {"machine": reports[0]["machine"], "results": [row for report in reports for row in report["results"]]}
    args.out.write_text(json.dumps(merged, indent=1) + "\n")
    for path in args.reports:
        path.unlink()


if __name__ == "__main__":
    main()
