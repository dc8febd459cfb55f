"""Live models, their attention calls, and the checks of these calls."""
