"""Pure functions of numbers, in float64: no torch, no records, usable alone."""
