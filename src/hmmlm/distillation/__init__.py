"""Distillation of a teacher into an HMM: k-means over its embeddings and transfer of its weights."""
