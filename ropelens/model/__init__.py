"""A live model: its attention calls, and the checks of what they show."""
