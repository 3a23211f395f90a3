"""Benchmarks: ``python -m tests.bench NAME [--json]``. Ours and its peers in one run, shown side by side."""
