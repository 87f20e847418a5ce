"""What all plans of a wrapper have in common: tiles, sizes, the mask's answers, checks."""
