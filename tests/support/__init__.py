"""What several test files share and is no test: kernels and variants, stand-ins, oracles."""
