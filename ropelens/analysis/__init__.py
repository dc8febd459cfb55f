"""One call from a model and text to results that show, save and report themselves."""
