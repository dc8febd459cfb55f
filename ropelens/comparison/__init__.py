"""Comparison of variants of RoPE: trained runs, or analyzed models."""
