"""Variants of RoPE, runs and models side by side."""
