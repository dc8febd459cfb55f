"""One attention call: rows, visibility, the formulas of a profile, and running sums."""
