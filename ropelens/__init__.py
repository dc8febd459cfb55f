"""ropelens: how a language model uses the frequencies of its rotary position embedding."""
