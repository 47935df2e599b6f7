"""How it is shown that a model keeps the records of a batch apart."""
