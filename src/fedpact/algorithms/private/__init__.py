"""Baselines that differ in how they choose noise and clip, one file each."""
