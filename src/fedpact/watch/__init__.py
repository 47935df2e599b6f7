"""A run, live: what its files say, as a page on this machine, as JSON, and for Prometheus."""
