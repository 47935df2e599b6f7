"""A model that stays inside its site: tuned there, chosen there, and compared with going alone."""
