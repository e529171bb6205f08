"""The content of a run folder: config, checkpoints, metrics, plots, notes."""
