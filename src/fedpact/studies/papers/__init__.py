"""Older theory of the papers, for comparison and for choosing parameters; loaded when called."""
