"""Everything a run leaves behind: its state and checkpoints, the best model, the numbers of each step."""
