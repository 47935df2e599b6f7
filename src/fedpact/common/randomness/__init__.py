"""Where randomness comes from: batches and noise, seeded or secure, which can be audited alone."""
