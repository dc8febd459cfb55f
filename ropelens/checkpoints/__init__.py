"""Checkpoints on disk: finding, checking and loading them."""
