"""What a run leaves in its folder: config, checkpoints, metrics, pictures, notes."""
