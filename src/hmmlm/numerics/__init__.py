"""Arithmetic that scans and queries share: products of probabilities in log space, and supports of states."""
