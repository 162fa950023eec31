"""What the commands of both halves share and no framework is needed for: weights, text, progress, log, checkpoints."""
