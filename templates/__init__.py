"""CUDA and C++ text that the code generator renders; data only."""
