"""KV caches of contiguous addresses over pages that come and go: xTensor of xLLM (section 4.3)."""
