"""Benchmarks, run as `python -m bench.<name> [--out FILE]` from the repository's root; none of them checks correctness."""
