"""Everything that depends on Keras' internals: private API, patches, model classes, building of models."""
