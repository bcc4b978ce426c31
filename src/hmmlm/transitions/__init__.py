"""Kinds of transitions of an HMM."""
