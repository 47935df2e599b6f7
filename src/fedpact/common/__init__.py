"""What every other package builds on: errors, checks, formats, files, messages, randomness."""
