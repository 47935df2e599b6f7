"""What every key of a configuration and every algorithm's setting means, read from the sources."""
