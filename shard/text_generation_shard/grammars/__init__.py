"""Texts that must have a form."""
