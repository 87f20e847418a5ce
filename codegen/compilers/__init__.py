"""NVRTC and the host compiler: where they are, what they are told, what they make."""
