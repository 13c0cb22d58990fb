"""Turns data on the host into slabs, one per execution."""
