"""The record of a run: numbers, events, rollouts, and a page that shows them."""
