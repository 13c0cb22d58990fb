"""Single mistakes, put into a copy of the code one at a time, to see whether the tests notice them."""
