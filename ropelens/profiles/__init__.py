"""A model and a text become a profile: labelled arrays."""
