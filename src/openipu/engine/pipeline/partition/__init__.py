"""Cuts models into stages: a model's graph, the stage of each layer, and automatic cuts."""
