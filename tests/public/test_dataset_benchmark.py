"""The dataset benchmark: what it reports, and that errors are raised."""

import json

import openipu as ipu
from openipu.dataset_benchmark import dataset_benchmark, infeed_benchmark
from openipu.errors import OutOfRangeError

import numpy as np
import pytest

KEYS = {"elements_processed", "total_bytes_processed", "time_elapsed", "elements_per_second", "bandwidth"}


def data():
    while True:
        yield np.zeros((4, 5), "float32"), np.zeros(4, "int32")


@pytest.mark.parametrize("do_memcpy", [True, False])
def test_dataset(capsys, do_memcpy):
    result = json.loads(dataset_benchmark(data, 3, 20, do_memcpy=do_memcpy))
    assert list(result) == ["epochs"]
    assert len(result["epochs"]) == 3
    for epoch in result["epochs"]:
        assert set(epoch) == KEYS
        assert epoch["elements_processed"] == 20
        assert epoch["total_bytes_processed"] == 20 * (4 * 5 * 4 + 4 * 4)
        assert epoch["elements_per_second"] == pytest.approx(20 / epoch["time_elapsed"])
        assert epoch["bandwidth"] == pytest.approx(epoch["total_bytes_processed"] / epoch["time_elapsed"] / 1e9)
    assert capsys.readouterr().out.count("Epoch") == 3


def test_the_result_reads_like_a_tensor():
    result = dataset_benchmark(data, 1, 5, print_stats=False)
    assert json.loads(result.numpy()) == json.loads(result)


def test_infeed_queue_begins_anew_afterwards(capsys):
    queue = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32(i) for i in range(6)])
    for _ in range(2):
        result = json.loads(infeed_benchmark(queue, 2, 3, print_stats=False))
        assert [epoch["elements_processed"] for epoch in result["epochs"]] == [3, 3]
    assert capsys.readouterr().out == ""


def test_errors_are_raised():
    with pytest.raises(ValueError, match="`number_of_epochs` is 0"):
        dataset_benchmark(data, 0, 1)
    with pytest.raises(ValueError, match=r"`elements_per_epochs` is 1\.5"):
        dataset_benchmark(data, 1, 1.5)
    with pytest.raises(ValueError, match="is not a dataset"):
        dataset_benchmark(3, 1, 1)
    with pytest.raises(TypeError, match="Give an `IPUInfeedQueue`"):
        infeed_benchmark([1], 1, 1)
    with pytest.raises(OutOfRangeError, match="ended after 1 of the 2 elements"):
        dataset_benchmark([np.ones(1)] * 5, 3, 2, print_stats=False)

    def broken():
        yield np.ones(1)
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        dataset_benchmark(broken, 1, 2)
