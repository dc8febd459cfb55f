"""One attention call: its rows, the formulas of a profile, and running sums."""
