"""The tutorial CNN with all of the tutorial's steps behind options.

Run it with `python examples/keras_tutorial/completed_example/main.py`: that is plain Keras on the CPU. Then add
`--use-ipu`, `--use-ipu --ipus 2`, `--use-ipu --pipelining`; `--help` lists all options.
"""

import openipu as ipu

import keras
from model import NUM_STAGES, model_fn, pipeline_model_fn
from utils import load_data, parse_arguments, steps_per_execution


def make_model(args):
    """A model for devices. Call this in the scope of a strategy."""
    if not args.pipelining:
        model = keras.Model(*model_fn())
        model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=args.accumulate)
        return model
    model = keras.Model(*pipeline_model_fn())
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=args.accumulate,
        pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule[args.schedule],
    )
    return model


def train_and_test(model, args, callbacks):
    """Train the model in the current scope and return its accuracies."""
    (x_train, y_train), (x_test, y_test) = load_data(args)
    model.compile(
        "sgd",
        "categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution(args, len(x_train)),
    )
    print("\nTraining")
    history = model.fit(
        x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, callbacks=callbacks, verbose=2
    )
    print("\nEvaluation")
    result = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0, return_dict=True)
    print(f"Test loss: {result['loss']:.4f}\nTest accuracy: {result['accuracy']:.4f}")
    return {"accuracy": history.history["accuracy"][-1], "test_accuracy": result["accuracy"]}


def main(argv=None, callbacks=()):
    args = parse_arguments(argv)
    callbacks = list(callbacks)
    if not args.use_ipu:
        print("Plain Keras on the CPU")
        with keras.device("cpu"):
            model = keras.Model(*model_fn())
            result = train_and_test(model, args, callbacks)
    else:
        if args.profile:
            ipu.reports.start(args.profile)
        stages = f"{NUM_STAGES} pipeline stages ({args.schedule}) x " if args.pipelining else ""
        print(f"{args.ipus} device(s): {stages}{args.replicas} replica(s)")
        print(f"Each update is made from {args.replicas * args.accumulate} batch(es) of {args.batch_size} images")
        cfg = ipu.config.IPUConfig()
        cfg.auto_select_ipus = args.ipus
        cfg.configure_ipu_system()
        with ipu.ipu_strategy.IPUStrategy().scope():
            model = make_model(args)
            result = train_and_test(model, args, callbacks)
    print("Program ran successfully")
    return result


if __name__ == "__main__":
    main()
