"""From files to partitions to a site's records."""
