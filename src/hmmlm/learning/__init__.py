"""Learning: a batch becomes an update; the loop and its checkpoints."""
