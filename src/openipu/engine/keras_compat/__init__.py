"""Everything that depends on how Keras is made inside: private API, patches, classes, building."""
