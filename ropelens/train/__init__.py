"""Training of small LLaMA-style models."""
