"""Trainer-to-engine weight copies: gather, transfer, receive, proof."""
