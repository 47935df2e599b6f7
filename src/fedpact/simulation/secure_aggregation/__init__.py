"""Secure aggregation: the server sees the sum of the sites' vectors and no single one.

docs/notes/secure-aggregation.md has the protocol, what it protects and what not. `encoding` makes
words of vectors, `graph` says who masks with whom, `keys` is the cryptography, `client` and
`session` are the two sides, `transport` is what `rounds.py` sees, and `setup` has all of it in one
process.
"""
