"""The figures of a run and of a comparison, in colours for light pages and dark ones."""
