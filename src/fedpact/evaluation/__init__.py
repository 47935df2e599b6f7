"""Tasks, metrics, and what a model is worth on held-out records, as a site may release it."""
