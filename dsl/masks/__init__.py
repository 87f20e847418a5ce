"""What a mask says of a tile or of a range of keys, without looking at its elements."""
