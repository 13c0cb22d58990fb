"""A model -> stages: its graph, which layer is in which stage, and automatic cuts."""
