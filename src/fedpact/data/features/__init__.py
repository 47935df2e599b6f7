"""What a site computes of each record by itself, once, before anything is trained on it."""
