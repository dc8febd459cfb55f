"""Train LLaMA-style models that ropelens can look into."""
