"""What users write: variants with their fields, plain callables, and how both are traced."""
