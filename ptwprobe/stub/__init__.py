"""stub stage."""
