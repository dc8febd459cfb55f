"""A live model rotates otherwise while a block runs: edits as values, and the block."""
