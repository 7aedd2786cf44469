"""From samples to the tensors of one forward/backward: who takes what, and how it is laid out."""
