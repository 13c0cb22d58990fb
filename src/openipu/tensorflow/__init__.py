"""Scripts written for TensorFlow 2 on the IPU, unmodified: `openipu run script.py`.

`import openipu.tensorflow` as the first line of a script does the same. From then on, in the whole process,
`tensorflow.python.ipu` and its relatives are OpenIPU (names.py), `tf.keras` is Keras 3 on JAX and understands idioms of
Keras 2 (idioms.py, datasets.py), TensorFlow's operations accept the arrays of traced code (bridge.py), and a
`tf.function` given to `strategy.run` becomes one compiled program (functions.py, control_flow.py, gradient_tape.py).
"""

from .install import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]

install()
