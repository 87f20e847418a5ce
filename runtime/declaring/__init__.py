"""From what a user declares to checked specifications and options."""
