"""What a serving engine needs around the kernels: memory, prefetching, graphs, other processes."""
