"""Model families: a configuration and the module it builds, θ → distributional parameters (π, A, O)."""
