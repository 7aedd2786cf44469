"""molt: reinforcement learning of LLM agents in plain PyTorch."""

__version__ = "0.1.0"
