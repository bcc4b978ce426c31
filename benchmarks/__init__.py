"""Speed benchmarks against other systems and against the hardware limit. See docs/benchmarks.md."""

from hmmlm.cli.main import shorten_spinning

shorten_spinning()
