"""The users' side of the DSL: variants with fields, plain callables, and the tracing of both."""
