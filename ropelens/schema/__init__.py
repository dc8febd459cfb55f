"""Tables of the variables of results: name, dims, unit and meaning of every number."""
