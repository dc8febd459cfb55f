"""The planes that RoPE rotates: frequencies, variants, selection and rotation."""
