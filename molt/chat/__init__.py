"""Messages to ids and back, by the model's own chat template."""
