"""The command line: one command a module; parses, builds a plan, calls."""
