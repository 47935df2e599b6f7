"""What a notebook shows of an object: a card, a table, a bar; in the colours of the pages."""
