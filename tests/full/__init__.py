"""Live tests at their full size: ``python -m tests.full NAME``."""
