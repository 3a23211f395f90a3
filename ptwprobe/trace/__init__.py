"""trace stage."""
