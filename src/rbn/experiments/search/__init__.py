"""Sweeps: many runs of a config with different settings, from a file, with Optuna."""
