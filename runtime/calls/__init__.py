"""What users call once, or call in place of another library."""
