"""A model, its options and the devices -> the loop that runs its stages.

Who does what: arguments.py checks what users say about a pipeline of functions, and rules.py what has to hold for any
pipeline. function_stages.py and keras_stages.py make stages of functions and of Keras models, assemble.py makes the
loop that runs stages of either kind. function_pipeline.py and keras_pipeline.py put all of this together.
"""
