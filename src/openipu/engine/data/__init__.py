"""Data on the host -> slabs, one per execution."""
