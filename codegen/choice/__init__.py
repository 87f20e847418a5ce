"""Which tile a kernel is compiled for, and what a batch costs with it."""
