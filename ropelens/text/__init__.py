"""Documents, tokens and the sequences that a measurement reads."""
