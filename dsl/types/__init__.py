"""What specifications are made of: element types, typed graphs, KV formats, sizes."""
