"""Which devices there are, which of them a model uses, and what they have room for."""
