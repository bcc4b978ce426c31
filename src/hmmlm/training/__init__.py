"""Training: a run from its configuration to its folder, text prepared, warm starts, distillation."""
