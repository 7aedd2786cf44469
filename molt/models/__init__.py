"""From token ids to log-probs: the Hugging Face model, its attention and the log-prob head."""
