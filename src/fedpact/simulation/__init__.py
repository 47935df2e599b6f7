"""Carry a run out on one machine: set-up, threads or Ray, resuming, extending, predicting."""
