"""The libraries whose model classes train. Nothing outside this folder knows which one made a model."""
