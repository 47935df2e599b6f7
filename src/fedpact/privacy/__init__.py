"""Everything that stands between the records and the outside: oracle, accounting, ledger."""
