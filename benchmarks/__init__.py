"""Speed benchmarks against other systems and against the hardware limit. See docs/benchmarks.md."""
