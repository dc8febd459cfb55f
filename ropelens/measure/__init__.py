"""A model and tokens become labelled numbers."""
