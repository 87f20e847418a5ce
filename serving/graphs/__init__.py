"""Steps of a model as CUDA graphs, made when they are needed: xLLM's adaptive graph mode (4.2)."""
