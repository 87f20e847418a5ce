"""Back ends for engines that others wrote; each is a room of its own and imports its engine."""
