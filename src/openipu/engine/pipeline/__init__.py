"""Pipelining: runtime/ runs stages, partition/ cuts models into stages, and build/ puts the two together."""
