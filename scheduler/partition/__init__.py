"""How work is cut and shared out among CTAs: along lines, longest first, or at fixed multiples."""
