"""The compiled loop: what one execution computes, how it is compiled, and how the host drives it."""
