"""Learning: configuration, updates, the training loop, checkpoints."""
