"""Pipelining. runtime/ runs stages, partition/ cuts models into them, build/ puts both together."""
