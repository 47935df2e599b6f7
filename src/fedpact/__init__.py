"""fedpact: train one model across data owners who keep their records."""
