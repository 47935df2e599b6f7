"""Everything that stands between the records and the outside."""
