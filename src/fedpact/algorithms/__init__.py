"""One file an algorithm, found by its file name."""
