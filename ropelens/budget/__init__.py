"""The attention budget: log-linear models of a head, their fit, and labels."""
