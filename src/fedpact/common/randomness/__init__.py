"""Random batches and noise, seeded or secure; this package can be audited on its own."""
