"""A deployment's two sides, server and site, whatever carries their messages."""
