"""Edits, silenced heads and patches, and measurements of their effects."""
