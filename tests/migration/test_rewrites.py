"""What becomes of scripts: before and after, by subject. Every result is also migrated again, which changes nothing."""

from __future__ import annotations

from openipu.migration.exports import exists

import pytest

from migrated import rewritten, text

IMPORTS = {
    "from tensorflow.python": ("from tensorflow.python import ipu\n", "import openipu as ipu\n"),
    "under another name": ("from tensorflow.python import ipu as dev\n", "import openipu as dev\n"),
    "import as": ("import tensorflow.python.ipu as ipu\n", "import openipu as ipu\n"),
    "from tensorflow": ("from tensorflow import ipu\n", "import openipu as ipu\n"),
    "dotted": (
        "import tensorflow.python.ipu\nc = tensorflow.python.ipu.config.IPUConfig()\n",
        "import openipu as ipu\nc = ipu.config.IPUConfig()\n",
    ),
    "modules of ipu": (
        "from tensorflow.python.ipu import ipu_strategy, utils\n",
        "from openipu import ipu_strategy, utils\n",
    ),
    "names of ipu": (
        "from tensorflow.python.ipu.config import IPUConfig as C\n",
        "from openipu.config import IPUConfig as C\n",
    ),
    "ops of ipu": (
        "from tensorflow.python.ipu.ops import pipelining_ops\n",
        "from openipu.ops import pipelining_ops\n",
    ),
    "keras": ("from tensorflow import keras\n", "import keras\n"),
    "keras as": ("import tensorflow.keras as K\n", "import keras as K\n"),
    "keras of tensorflow.python": ("from tensorflow.python import keras\n", "import keras\n"),
    "layers": (
        "from tensorflow.keras.layers import Dense, Input\n",
        "from keras.layers import Dense, Input\n",
    ),
    "a list with comments keeps its form": (
        "from tensorflow.keras.layers import (  # some\n    Dense,   # first\n\tInput)\n",
        "from keras.layers import (  # some\n    Dense,   # first\n\tInput)\n",
    ),
    "a star": ("from tensorflow.keras.layers import *\n", "from keras.layers import *\n"),
    "different places": (
        "from tensorflow import keras, data\nprint(keras, data)\n",
        "import keras\nfrom tensorflow import data\nprint(keras, data)\n",
    ),
    "keras.ipu": (
        "from tensorflow.keras.ipu import PipelineStage\nfrom keras import ipu\n",
        "from openipu.keras import PipelineStage\nfrom openipu import keras as ipu\n",
    ),
    "popdist": (
        "import popdist\nimport popdist.tensorflow\npopdist.tensorflow.set_ipu_config\npopdist.init()\n",
        "from openipu import popdist\npopdist.tensorflow.set_ipu_config\npopdist.init()\n",
    ),
    "names of popdist": (
        "from popdist.tensorflow import set_ipu_config\n",
        "from openipu.popdist.tensorflow import set_ipu_config\n",
    ),
    "old optimizers": (
        "from tensorflow.python.keras.optimizer_v2.gradient_descent import SGD\nSGD(0.1)\n",
        "from keras.optimizers import SGD\nSGD(0.1)\n",
    ),
    "an import that is not used stays": ("import tensorflow as tf\n", "import tensorflow as tf\n"),
    "several on a line": (
        "import os; import tensorflow as tf; x = tf.keras.Model\n",
        "import keras\nimport os; x = keras.Model\n",
    ),
    "in a function": (
        "def f():\n    from tensorflow import keras\n    return keras.Model\n",
        "def f():\n    import keras\n    return keras.Model\n",
    ),
    "all that a function has": (
        "import tensorflow as tf\ndef f():\n    from tensorflow import keras\ntf.keras.Model\n",
        "import keras\ndef f():\n    pass\nkeras.Model\n",
    ),
}


@pytest.mark.parametrize(("before", "after"), IMPORTS.values(), ids=IMPORTS)
def test_imports(before, after):
    result = rewritten(before)
    assert result.new == after
    assert result.notes == ()


ORDER = {
    "openipu moves above tensorflow": (
        """
        import tensorflow as tf
        from tensorflow.python import ipu  # the device
        tf.data, ipu
        """,
        """
        import openipu as ipu  # the device
        import tensorflow as tf
        tf.data, ipu
        """,
    ),
    "it stays if nothing above loads Keras": (
        """
        import os
        import numpy as np
        from tensorflow.python import ipu
        from tensorflow import keras
        """,
        """
        import os
        import numpy as np
        import openipu as ipu
        import keras
        """,
    ),
    "modules beside the script may load Keras": (
        "import beside\nfrom tensorflow.python import ipu\n",
        "import openipu as ipu\nimport beside\n",
    ),
    "relative imports, too": (
        "from . import model\nfrom tensorflow.python import ipu\n",
        "import openipu as ipu\nfrom . import model\n",
    ),
    "a native script in the wrong order": (
        "import keras\nimport openipu as ipu\n",
        "import openipu as ipu\nimport keras\n",
    ),
    "above an import whose second module is TensorFlow": (
        "import numpy as np, tensorflow as tf\nfrom tensorflow.python import ipu\ntf.data, ipu\n",
        "import openipu as ipu\nimport numpy as np, tensorflow as tf\ntf.data, ipu\n",
    ),
    "Keras takes the place of TensorFlow": (
        "from tensorflow.python import ipu\nimport os\nimport tensorflow as tf\ntf.keras.Model(ipu)\n",
        "import openipu as ipu\nimport os\nimport keras\nkeras.Model(ipu)\n",
    ),
    "a docstring and the future come first": (
        '"""Doc."""\nfrom __future__ import annotations\ndef f():\n    import tensorflow as tf\n    tf.keras.Model\n',
        '"""Doc."""\nfrom __future__ import annotations\nimport keras\ndef f():\n    keras.Model\n',
    ),
    "an import that may fail": (
        """
        try:
            from tensorflow.python import ipu
        except ImportError:
            ipu = None
        import tensorflow as tf
        tf.keras.Model
        """,
        """
        try:
            import openipu as ipu
        except ImportError:
            ipu = None
        import keras
        keras.Model
        """,
    ),
    "openipu only in a function": (
        "from tensorflow import keras\ndef f():\n    from tensorflow.python import ipu\n    return ipu, keras\n",
        "import openipu\nimport keras\ndef f():\n    import openipu as ipu\n    return ipu, keras\n",
    ),
    "an import in a function does not hide Keras": (
        """
        def f(x):
            import tensorflow as tf
            if x:
                from tensorflow import keras
                return keras
            return tf.keras.Model
        """,
        """
        import keras
        def f(x):
            if x:
                return keras
            return keras.Model
        """,
    ),
    "a name that is taken": (
        "keras = 3\nimport tensorflow as tf\ntf.keras.Model\n",
        "keras = 3\nimport keras as keras_\nkeras_.Model\n",
    ),
    "only openipu moves": (
        "import keras\nfrom tensorflow import ipu, data  # both\nkeras, ipu, data\n",
        "import openipu as ipu\nimport keras\nfrom tensorflow import data  # both\nkeras, ipu, data\n",
    ),
    "a name that comes from somewhere": (
        "from beside import *\nimport tensorflow as tf\ntf.keras.Model(keras)\n",
        "import keras as keras_\nfrom beside import *\nkeras_.Model(keras)\n",
    ),
    "a comment of an import that goes": (
        "import tensorflow as tf  # for Keras\nimport os  # this\ntf.keras.Model\n",
        "import keras  # for Keras\nimport os  # this\nkeras.Model\n",
    ),
    "Windows line ends": (
        "import tensorflow as tf\r\nfrom tensorflow.python import ipu\r\ntf.keras.Model(ipu)\r\n",
        "import openipu as ipu\r\nimport keras\r\nkeras.Model(ipu)\r\n",
    ),
    "no line end at all": ("from tensorflow.python import ipu", "import openipu as ipu"),
}


@pytest.mark.parametrize(("before", "after"), ORDER.values(), ids=ORDER)
def test_order(before, after):
    result = rewritten(before, frozenset({"beside"}))
    assert result.new == text(after)
    assert result.notes == ()


LINES = {
    "tf.keras.layers.Dense(3, activation=tf.nn.relu)": "keras.layers.Dense(3, activation=keras.activations.relu)",
    "tf.keras.optimizers.SGD(lr=0.1)": "keras.optimizers.SGD(learning_rate=0.1)",
    "tf.keras.optimizers.SGD(decay=0.0, lr=0.1,)": "keras.optimizers.SGD(learning_rate=0.1,)",
    "tf.optimizers.Adam(1e-3)": "keras.optimizers.Adam(1e-3)",
    "tf.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.SUM)": (
        'keras.losses.MeanSquaredError(reduction="sum")'
    ),
    "tf.metrics.Mean()": "keras.metrics.Mean()",
    "tf.keras.Input(shape=(80))": "keras.Input(shape=(80,))",
    "tf.keras.Input(80, dtype=tf.int32)": 'keras.Input((80,), dtype="int32")',
    "tf.keras.Input((80,))": "keras.Input((80,))",
    "tf.keras.layers.Dense(3, input_shape=(4))": "keras.layers.Dense(3, input_shape=(4,))",
    "tf.keras.layers.BatchNormalization(fused=True, axis=1)": "keras.layers.BatchNormalization(axis=1)",
    "tf.keras.layers.BatchNormalization(fused=True)": "keras.layers.BatchNormalization()",
    "tf.keras.layers.Embedding(10, 2, input_length=7)": "keras.layers.Embedding(10, 2)",
    "tf.keras.layers.LeakyReLU(alpha=0.3)": "keras.layers.LeakyReLU(negative_slope=0.3)",
    "tf.keras.layers.experimental.preprocessing.Rescaling(2.0)": "keras.layers.Rescaling(2.0)",
    "tf.keras.optimizers.legacy.SGD()": "keras.optimizers.SGD()",
    "tf.keras.experimental.CosineDecay(1, 2)": "keras.optimizers.schedules.CosineDecay(1, 2)",
    "tf.keras.mixed_precision.experimental.set_policy('mixed_float16')": (
        "keras.mixed_precision.set_global_policy('mixed_float16')"
    ),
    "tf.keras.backend.mean(x, axis=-1)": "keras.ops.mean(x, axis=-1)",
    "tf.keras.backend.argmax(x)": "keras.ops.argmax(x, axis=-1)",
    "tf.keras.backend.epsilon()": "keras.backend.epsilon()",
    "tf.compat.v1.metrics.accuracy(labels, predictions = (p))": "(keras.metrics.Accuracy(), labels, (p))",
    "tf.compat.v1.metrics.mean(values=x)": "(keras.metrics.Mean(), x)",
    "tf.compat.v1.train.MomentumOptimizer(0.1, momentum=0.9)": "keras.optimizers.SGD(0.1, momentum=0.9)",
    "tf.compat.v1.glorot_uniform_initializer()": "keras.initializers.GlorotUniform()",
    "tf.compat.v1.zeros_initializer()": "keras.initializers.Zeros()",
    "tf.random.set_seed(1)": "keras.utils.set_random_seed(1)",
    "tf.zeros_initializer()": "keras.initializers.Zeros()",
    "tf.random_normal_initializer(stddev=1.0)": "keras.initializers.RandomNormal(stddev=1.0)",
    "model.compile(experimental_steps_per_execution=9, x=tf.keras)": "model.compile(steps_per_execution=9, x=keras)",
    "model.fit_generator(tf.keras)": "model.fit(keras)",
    "strategy.experimental_run_v2(tf.keras)": "strategy.run(keras)",
}


@pytest.mark.parametrize(("before", "after"), LINES.items(), ids=LINES)
def test_names_and_arguments_of_keras(before, after):
    result = rewritten(f"import tensorflow as tf\n{before}\n")
    assert result.new == f"import keras\n{after}\n"
    assert result.notes == ()


IPU_LINES = {
    "ipu.config.IPUConfig()": "ipu.config.IPUConfig()",
    "ipu.ops.pipelining_ops.PipelineSchedule.Grouped": "ipu.ops.pipelining_ops.PipelineSchedule.Grouped",
    "ipu.pipelining_ops.recomputation_checkpoint(x)": "ipu.pipelining_ops.recomputation_checkpoint(x)",
    "ipu.utils.reset_ipu_seed(1)": "ipu.utils.reset_ipu_seed(1)",
    "ipu.ipu_infeed_queue.IPUInfeedQueue(d, feed_name='f')": "ipu.ipu_infeed_queue.IPUInfeedQueue(d)",
    "ipu.nn_ops.gelu(x)": "ipu.nn_ops.gelu(x)",
    "ipu.embedding_ops.embedding_lookup(w, i, name='a')": "ipu.embedding_ops.embedding_lookup(w, i, name='a')",
}


@pytest.mark.parametrize(("before", "after"), IPU_LINES.items(), ids=IPU_LINES)
def test_names_of_ipu(before, after):
    result = rewritten(f"from tensorflow.python import ipu\n{before}\n")
    assert result.new.splitlines()[-1] == after
    assert result.notes == ()


def test_names_of_tensorflow_that_are_now_in_ipu():
    result = rewritten(
        """
        import tensorflow as tf
        with tf.keras.ipu.PipelineStage(0):
            mode = tf.estimator.ModeKeys.TRAIN
        """
    )
    assert result.new == text(
        """
        import openipu as ipu
        with ipu.keras.PipelineStage(0):
            mode = ipu.estimator.ModeKeys.TRAIN
        """
    )


def test_a_check_of_the_version_goes():
    result = rewritten(
        """
        import tensorflow as tf

        if tf.__version__[0] != '2':
            raise ImportError("TensorFlow 2 is required")

        tf.keras.Model
        """
    )
    assert result.new == "import keras\n\nkeras.Model\n"


@pytest.mark.parametrize(
    "code",
    [
        "if tf.__version__[0] != '2':\n    raise ImportError\nelse:\n    x = 1\n",
        "if tf.__version__[0] != '2' and strict:\n    raise ImportError\n",
        "if x:\n    y = 1\nelif tf.__version__[0] != '2':\n    raise ImportError\n",
        "if tf.__version__[0] != '2':\n    print('old')\n",
    ],
)
def test_other_checks_stay(code):
    assert rewritten(f"import tensorflow as tf\n{code}").new == f"import tensorflow as tf\n{code}"


def test_a_check_that_is_all_of_a_function():
    code = "def check():\n    if int(tf.__version__.split('.')[0]) < 2:\n        raise ImportError\n"
    assert rewritten(f"import tensorflow as tf\n{code}tf.keras.Model\n").new == (
        "import keras\ndef check():\n    pass\nkeras.Model\n"
    )


def test_other_things_with_the_same_names_stay():
    code = text(
        """
        import optimizers
        def f(tf, lr):
            tf.keras.Model(lr=lr)
            return optimizers.SGD(lr=lr), tf.nn.relu
        """
    )
    assert rewritten(code).new == code


@pytest.mark.parametrize("name", ["layers.LSTM", "layers.RecomputationCheckpoint", "optimizers.AdamIpuOptimizer"])
def test_addons_become_what_openipu_has(name):
    """A class that OpenIPU does not have is left, with a note."""
    module, _, cls = name.rpartition(".")
    code = f"from ipu_tensorflow_addons.keras.{module} import {cls}\n{cls}()\n"
    result = rewritten(code)
    if exists(f"openipu.keras.{name}"):
        assert (result.new, result.notes) == (f"from openipu.keras.{module} import {cls}\n{cls}()\n", ())
    else:
        assert result.new == code
        (note,) = result.notes
        assert "take the one of Keras" in note.reason
