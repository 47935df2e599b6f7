"""A federation on real machines: its files, keys, processes, and its two sides."""
