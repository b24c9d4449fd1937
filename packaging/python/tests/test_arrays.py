"""Proves that a wrong array raises a typed error that names the argument and the reason, and
that nothing is written."""

import numpy as np
import pytest

import spillway

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

NAMES = ("param", "grad", "exp_avg", "exp_avg_sq")


def numpy_arrays(n=32):
    return {name: np.full(n, 0.5, np.float32) for name in NAMES}


def torch_arrays(n=32):
    return {name: torch.full((n,), 0.5) for name in NAMES}


def read_only(array):
    array.flags.writeable = False
    return array


def misaligned(n):
    return np.zeros(4 * n + 1, np.uint8)[1:].view(np.float32)


def columns(array):
    return np.asfortranarray(np.ones((4, 8), np.float32))


WRONG_NUMPY = {
    "float64": ("param", lambda a: a.astype(np.float64), "dtype float64"),
    "int32": ("grad", lambda a: a.astype(np.int32), "dtype int32"),
    "foreign byte order": ("exp_avg", lambda a: a.astype(">f4"), "foreign byte order"),
    "uint16 unsaid": ("grad", lambda a: a.astype(np.uint16), 'uint16_dtype="bf16"'),
    "strided": ("exp_avg", lambda a: np.ones(64, np.float32)[::2], "not contiguous"),
    "fortran order": ("param", columns, "not contiguous"),
    "read-only param": ("param", read_only, "read-only"),
    "read-only state": ("exp_avg_sq", read_only, "read-only"),
    "misaligned": ("exp_avg", lambda a: misaligned(32), "aligned"),
    "short": ("exp_avg_sq", lambda a: a[:31].copy(), "shape (31,)"),
    "long": ("grad", lambda a: np.ones(33, np.float32), "shape (33,)"),
    "list": ("grad", lambda a: a.tolist(), "is a list"),
    "none": ("exp_avg", lambda a: None, "is a NoneType"),
    "states of two dtypes": ("exp_avg_sq", lambda a: a.astype(np.float16), "another dtype"),
}
WRONG_TORCH = {
    "float64": ("param", lambda t: t.double(), "dtype float64"),
    "strided": ("grad", lambda t: torch.ones(64)[::2], "not contiguous"),
    "transposed": ("param", lambda t: torch.ones(4, 8).t(), "not contiguous"),
    "other device": ("exp_avg", lambda t: t.to("meta"), "device meta"),
    "sparse": ("grad", lambda t: t.to_sparse(), "sparse"),
    "short": ("exp_avg_sq", lambda t: t[:16].clone(), "shape (16,)"),
    "other shape": ("grad", lambda t: torch.ones(31), "shape (31,)"),
}


@pytest.mark.parametrize("case", WRONG_NUMPY)
def test_wrong_numpy_array(case):
    refuse(numpy_arrays(), *WRONG_NUMPY[case])


@pytest.mark.parametrize("case", WRONG_TORCH)
def test_wrong_torch_tensor(case):
    refuse(torch_arrays(), *WRONG_TORCH[case])


def refuse(arrays, name, spoil, reason):
    arrays[name] = spoil(arrays[name])
    before = {key: snapshot(array) for key, array in arrays.items()}
    with pytest.raises(spillway.InvalidArgumentError) as caught:
        spillway.Adam().step(
            [
                tuple(numpy_arrays().values()) if isinstance(arrays["param"], np.ndarray) else tuple(torch_arrays().values()),
                tuple(arrays.values()),
            ]
        )
    assert f"tensors[1].{name}" in str(caught.value) and reason in str(caught.value)
    assert caught.value.status == 1 and isinstance(caught.value, ValueError)
    assert all(snapshot(array) == before[key] for key, array in arrays.items())


def snapshot(array):
    if isinstance(array, np.ndarray):
        return array.tobytes()
    if isinstance(array, torch.Tensor) and array.layout is torch.strided and array.device.type == "cpu":
        return array.contiguous().numpy().tobytes()
    return None


def test_two_shapes_of_one_length_are_refused_but_a_flat_array_fits_any():
    square = np.ones((4, 8), np.float32)
    with pytest.raises(spillway.InvalidArgumentError, match=r"grad has shape \(8, 4\)"):
        spillway.Adam().step([(square, np.ones((8, 4), np.float32), square.copy(), square.copy())])
    flat = [np.ones(32, np.float32) for _ in range(3)]
    spillway.Adam().step([(square, *flat)])
    assert (square != 1).all()


@pytest.mark.parametrize("count", [0, 3, 6])
def test_a_tuple_of_the_wrong_length(count):
    with pytest.raises(spillway.InvalidArgumentError, match=rf"tensors\[0\] has {count} arrays"):
        spillway.Adam().step([tuple(np.ones(4, np.float32) for _ in range(count))])


def test_overlapping_arrays_are_refused():
    memory = np.ones(64, np.float32)
    before = memory.copy()
    with pytest.raises(spillway.InvalidArgumentError):
        spillway.Adam().step([(memory[:32], np.ones(32, np.float32), memory[16:48], np.ones(32, np.float32))])
    assert (memory == before).all()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": "fast"},
        {"betas": (0.9,)},
        {"betas": (1.5, 0.9)},
        {"betas": (0.9, 1.0)},
        {"eps": -1.0},
        {"weight_decay_mode": "both"},
        {"lr": float("nan")},
    ],
)
def test_wrong_options(options):
    arrays = numpy_arrays()
    with pytest.raises(spillway.InvalidArgumentError):
        spillway.Adam(**options).step([tuple(arrays.values())])
    assert (arrays["param"] == 0.5).all()


def test_arrays_are_updated_in_place_without_a_copy():
    """For the library, a torch tensor and the numpy array that shares its memory are the same memory."""
    arrays = numpy_arrays(1000)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    spillway.Adam(lr=0.1).step([tuple(tensors.values())])
    assert (arrays["param"] != 0.5).all() and (arrays["exp_avg_sq"] != 0.5).all()


def test_bfloat16_is_the_same_from_torch_ml_dtypes_and_said_uint16():
    torch.manual_seed(1)
    grad = torch.randn(333).bfloat16()
    bits = grad.view(torch.uint16).numpy()
    results = []
    for given, said in ((grad, None), (bits.view(ml_dtypes.bfloat16), None), (bits, "bf16")):
        param, exp_avg, exp_avg_sq = (np.ones(333, np.float32) for _ in range(3))
        spillway.Adam().step([(param, given, exp_avg, exp_avg_sq)], uint16_dtype=said)
        results.append(param.tobytes())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("said", ["f32", "int8", 3])
def test_uint16_cannot_hold_other_dtypes(said):
    arrays = numpy_arrays()
    arrays["grad"] = arrays["grad"].astype(np.uint16)
    with pytest.raises(spillway.InvalidArgumentError):
        spillway.Adam().step([tuple(arrays.values())], uint16_dtype=said)
