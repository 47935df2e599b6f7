"""A run's statement in the forms of others; none names a site or counts fewer than a few."""
