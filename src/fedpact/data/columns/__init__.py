"""A table's columns: what is made of each by what was declared, and advice where nothing was."""
