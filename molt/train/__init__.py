"""What a rank does with a batch: the optimizer step, the optimizer, checkpoints, and SFT."""
