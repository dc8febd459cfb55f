"""A live model rotates otherwise while a block runs."""
