"""A live model rotates otherwise, or heads are silenced, while a block runs."""
