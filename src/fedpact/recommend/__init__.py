"""What to choose for a budget, from public numbers alone."""
