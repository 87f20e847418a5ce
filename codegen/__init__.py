"""Intermediate representation in, cubin or shared object out; needs no GPU."""
