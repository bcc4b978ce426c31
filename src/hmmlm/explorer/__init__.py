"""The explorer: a page on this machine that shows what a model has learned."""
