"""Texts as data sets."""
