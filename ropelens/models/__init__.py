"""All that knows transformers: loading, texts, the attention doorway, measured rotations."""
