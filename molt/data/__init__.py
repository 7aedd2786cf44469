"""Files in, prompts and conversations out."""
