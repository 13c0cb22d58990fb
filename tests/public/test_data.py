from collections import Counter
from typing import NamedTuple

from openipu import data

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sizes = st.integers(min_value=1, max_value=40)


class Pair(NamedTuple):
    left: np.ndarray
    right: np.ndarray


def rows_of(count: int) -> np.ndarray:
    """Rows that name themselves: row i is (i + 1, -(i + 1)), never zero."""
    names = np.arange(1, count + 1, dtype=np.float32)
    return np.stack([names, -names], axis=1)


# make_divisible


def test_make_divisible_gives_the_documented_mnist_lengths():
    assert data.make_divisible(60000, 64) == 60000 - 32
    assert data.make_divisible(10000, 64) == 10000 - 16
    assert data.make_divisible(60000, 64 * 2 * 8) == 59392


@given(number=st.integers(0, 10**9), divisor=st.integers(1, 10**6))
def test_make_divisible_is_the_largest_multiple(number, divisor):
    result = data.make_divisible(number, divisor)
    assert result % divisor == 0
    assert result <= number < result + divisor


@pytest.mark.parametrize(
    ("number", "divisor", "message"),
    [
        (-1, 4, "`number` is -1. Give a whole number of 0 or more"),
        (10, 0, "`divisor` is 0. Give a whole number of 1 or more"),
        (10, -3, "`divisor` is -3. Give a whole number"),
        (10.0, 4, "`number` is 10.0. Give a whole number"),
        (10, "4", "`divisor` is '4'. Give a whole number"),
        (True, 4, "`number` is True. Give a whole number"),
    ],
)
def test_make_divisible_refuses(number, divisor, message):
    with pytest.raises(ValueError, match=message):
        data.make_divisible(number, divisor)


def test_make_divisible_takes_numpy_integers():
    assert data.make_divisible(np.int64(10), np.int32(4)) == 8


# trim


@given(rows=sizes, batch_size=sizes, multiple=st.integers(1, 4))
def test_trim_keeps_the_first_whole_groups(rows, batch_size, multiple):
    x = rows_of(rows)
    if rows < batch_size * multiple:
        with pytest.raises(ValueError, match=f"{rows} rows are fewer than one group"):
            data.trim(x, batch_size=batch_size, multiple=multiple)
        return
    trimmed = data.trim(x, batch_size=batch_size, multiple=multiple)
    assert len(trimmed) == data.make_divisible(rows, batch_size * multiple)
    np.testing.assert_array_equal(trimmed, x[: len(trimmed)])
    assert np.shares_memory(trimmed, x)


def test_trim_keeps_the_structure():
    x = {"image": rows_of(10), "pair": Pair(np.arange(10), np.arange(10) * 2)}
    y = [np.arange(10), (np.ones(10),)]
    trimmed_x, trimmed_y = data.trim(x, y, batch_size=4)
    assert trimmed_x["image"].shape == (8, 2)
    assert isinstance(trimmed_x["pair"], Pair)
    np.testing.assert_array_equal(trimmed_x["pair"].right, np.arange(8) * 2)
    assert isinstance(trimmed_y, list)
    assert isinstance(trimmed_y[1], tuple)
    assert trimmed_y[1][0].shape == (8,)


def test_unequal_rows_are_named_with_their_numbers():
    with pytest.raises(ValueError, match=r"data\[0\]\['a'\] has 10, data\[1\] has 9"):
        data.trim({"a": rows_of(10)}, rows_of(9), batch_size=2)


@pytest.mark.parametrize("bad", [3, "text", np.float32(1), [1, 2, 3], iter([1])])
def test_what_is_not_an_array_is_refused(bad):
    with pytest.raises(ValueError, match="must be an array with at least one axis"):
        data.trim(bad, batch_size=1)


@pytest.mark.parametrize("function", [data.trim, data.repeat])
def test_no_array_at_all_is_refused(function):
    with pytest.raises(ValueError, match="Give at least one array"):
        function(batch_size=1)


@pytest.mark.parametrize("bad", [0, -1, 2.5, None])
@pytest.mark.parametrize("function", [data.trim, data.repeat, data.pad])
def test_bad_batch_size_is_refused(function, bad):
    with pytest.raises(ValueError, match=r"`batch_size` is .* Give a whole number of 1 or more"):
        function(rows_of(4), batch_size=bad)


# repeat


@given(rows=sizes, batch_size=sizes, loops=st.integers(1, 4), shuffle=st.booleans())
def test_repeat_loses_no_row_and_every_batch_is_static(rows, batch_size, loops, shuffle):
    batches = data.repeat(np.arange(rows), np.arange(rows) * 10, batch_size=batch_size, shuffle=shuffle, seed=3)
    seen = []
    for index in range(-(-rows * loops // batch_size)):
        x, y = batches[index]
        assert x.shape == y.shape == (batch_size,)
        np.testing.assert_array_equal(y, x * 10)
        seen.extend(x.tolist())
    for loop in range(loops):
        assert Counter(seen[loop * rows : (loop + 1) * rows]) == Counter(range(rows))
    if not shuffle:
        assert seen == [row % rows for row in range(len(seen))]


def test_repeat_shuffles_every_loop_anew_and_the_same_in_every_run():
    def two_loops(seed: int) -> list[list[int]]:
        batches = data.repeat(np.arange(50), batch_size=50, shuffle=True, seed=seed)
        return [batches[0][0].tolist(), batches[1][0].tolist()]

    first, second = two_loops(seed=1)
    assert first != sorted(first)
    assert first != second
    assert two_loops(seed=1) == [first, second]
    assert two_loops(seed=2) != [first, second]


def test_repeat_trains_a_keras_model_over_the_end_of_the_data():
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = data.repeat(rows_of(10), np.ones(10, np.float32), batch_size=4)
    assert batches.num_batches is None
    history = model.fit(batches, steps_per_epoch=5, epochs=2, shuffle=False, verbose=0)
    assert len(history.history["loss"]) == 2
    assert int(model.optimizer.iterations) == 10


def test_repeat_refuses_empty_data_and_too_many_structures():
    with pytest.raises(ValueError, match="0 rows"):
        data.repeat(np.zeros((0, 3)), batch_size=2)
    with pytest.raises(ValueError, match="4 structures"):
        data.repeat(*[np.ones(3)] * 4, batch_size=2)


# pad


@given(rows=sizes, batch_size=sizes)
def test_pad_adds_less_than_a_batch_of_weightless_zeros(rows, batch_size):
    x, y, weight = data.pad(rows_of(rows), np.arange(1, rows + 1), batch_size=batch_size)
    assert len(x) == len(y) == len(weight)
    assert len(x) % batch_size == 0
    assert 0 <= len(x) - rows < batch_size
    np.testing.assert_array_equal(x[:rows], rows_of(rows))
    np.testing.assert_array_equal(y[:rows], np.arange(1, rows + 1))
    assert not x[rows:].any()
    assert not y[rows:].any()
    np.testing.assert_array_equal(weight, np.arange(len(x)) < rows)
    assert weight.dtype == np.float32


def test_pad_keeps_given_weights_structures_and_types():
    x = {"a": np.ones((3, 2), np.uint8), "b": [np.ones(3, np.float64)]}
    padded, none, weight = data.pad(x, batch_size=4, sample_weight=np.array([2, 0, 3]))
    assert none is None
    assert padded["a"].dtype == np.uint8
    assert padded["b"][0].dtype == np.float64
    assert weight.tolist() == [2.0, 0.0, 3.0, 0.0]
    assert weight.dtype == np.float32
    temporal = data.pad(x, batch_size=2, sample_weight=np.ones((3, 5), np.float64))[2]
    assert temporal.shape == (4, 5)
    assert temporal.dtype == np.float64


def test_pad_refuses_weights_of_another_length():
    with pytest.raises(ValueError, match=r"data\[0\] has 3, data\[1\] has 3, data\[2\] has 2"):
        data.pad(np.ones(3), np.ones(3), batch_size=2, sample_weight=np.ones(2))


def test_padded_rows_do_not_change_a_weighted_evaluation():
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(loss="mse", weighted_metrics=["mae"])
    x, y = rows_of(10) + np.array([[1.0, 3.0]], np.float32), np.arange(10, dtype=np.float32)
    expected = model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)["mae"]
    padded_x, padded_y, weight = data.pad(x, y, batch_size=4)
    got = model.evaluate(padded_x, padded_y, sample_weight=weight, batch_size=4, verbose=0, return_dict=True)["mae"]
    assert got == pytest.approx(expected, rel=1e-6)
