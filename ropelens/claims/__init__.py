"""Published claims about RoPE, tested against nulls."""
