"""Why a row misses its stretch, one sentence each: (table, row) -> sentence. Kept by hand."""

REMARKS: dict[tuple[str, str], str] = {}
