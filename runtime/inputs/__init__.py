"""What plan and run are given: checks, conversions, and what is kept of it."""
