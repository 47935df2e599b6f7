"""Clipped sums of per-sample gradients: linear algebra that knows no budget."""
