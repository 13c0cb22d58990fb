"""Which devices there are, which of them a model uses, and how much memory they have."""
