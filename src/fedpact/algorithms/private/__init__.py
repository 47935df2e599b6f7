"""Baselines whose own idea is how noise and clip are chosen, one file each."""
