"""The recursions of an HMM: filter, messages, likelihood, gradient and counts, for any pair of kinds."""
