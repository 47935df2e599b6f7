"""An algorithm with its settings, and what goes around any of them."""
