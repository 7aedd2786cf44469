"""Engines, runners and the producer: prompt → rollout → trajectory → reward."""
