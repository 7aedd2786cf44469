"""From samples to the tensors of one forward/backward: which rank takes which sample, and how they are laid out."""
