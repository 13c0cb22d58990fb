"""`openipu migrate`: TensorFlow 2 scripts for the IPU become native OpenIPU scripts.

Everything but `files.py` is pure: the text of a script goes in, edits and remarks come out. LibCST reads the scripts,
and edits replace pieces of their text, so that all else stays as it is, to the byte.
"""
