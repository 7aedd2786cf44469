"""The algorithms: pure functions of tensors and numbers. docs/algorithms.md has every formula."""
