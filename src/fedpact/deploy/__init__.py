"""A federation on real machines: its files (`write`), its keys, and its processes."""
