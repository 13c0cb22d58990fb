"""Builds the loop that runs a model's stages, from the model, its options and the devices.

Who does what: arguments.py checks the arguments of a pipeline of functions, and rules.py the rules for all pipelines.
function_stages.py turns functions into stages, keras_stages.py does so for Keras models, and assemble.py makes the loop
that runs stages of either kind. function_pipeline.py and keras_pipeline.py put all of this together.
"""
