"""From files to partitions to a site's records, and the features computed of them."""
