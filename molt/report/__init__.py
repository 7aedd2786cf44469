"""What a run leaves behind: numbers, events, rollouts, and a page that shows them."""
