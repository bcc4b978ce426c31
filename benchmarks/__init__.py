"""Measurements of speed, against other systems and against the machine's limit. See docs/benchmarks.md."""
