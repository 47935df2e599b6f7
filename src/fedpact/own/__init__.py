"""Code of a user's own: what a plan calls it, and how it is found again."""
