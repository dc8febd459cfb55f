"""Finding, checking and loading checkpoints."""
