"""The planes that RoPE turns: frequencies, variants, which to choose, how to turn them."""
