"""Kinds of emissions of an HMM."""
