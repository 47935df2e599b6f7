"""Several plans on the same data, partition, seeds and budgets, carried out side by side."""
