"""Secure aggregation: the server sees the sum of the sites' vectors and no single one.

docs/notes/secure-aggregation.md describes the protocol and what it protects. `encoding` turns
vectors into words, `graph` chooses who masks with whom, `keys` has the cryptography, `client` and
`session` are the two sides, `transport` is what `rounds.py` sees, and `setup` simulates all of it.
"""
