"""Sweeps: many runs of a config with different settings, found in files and kept by Optuna."""
