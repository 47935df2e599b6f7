"""Secure aggregation: the server sees the sum of the sites' vectors and no single one.

docs/secure-aggregation.md has the protocol, what it protects and what not. `ring` is the encoding,
`keys` the cryptography, `site` and `server` the two sides of a session, `exchange` the transport
that `rounds.py` sees.
"""
