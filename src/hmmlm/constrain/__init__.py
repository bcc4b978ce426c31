"""Constraints on texts: automata over tokens, and an HMM that looks ahead to what they accept."""
