"""What if: the best splits of a model over devices that are not there, predicted from its counted operations."""
