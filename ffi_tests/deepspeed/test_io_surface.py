"""Proves that async_io, pin_memory and gds have DeepSpeed's interface. The docstrings of the compiled ops list
every function and method. The test calls each on both ops with the same arguments, in every way that the
signature allows, and compares the results. Every method in the sources of the oldest version and of gds exists
and takes the declared arguments."""

import os
import pathlib
import re

import pytest
import torch

import spillway

SIZE = 16384
_OVERLOAD = re.compile(r"^(?:\d+\. )?\w+\(self: [\w.]+(?:, )?(.*)\) -> [\w.]+$", re.M)
_PARAMETER = re.compile(r"(\w+): [\w.| ]+?(?: = (\w+))?(?:, |$)")


def overloads(function):
    """Parses [(parameters as (name, has a default)...)] of a compiled function from the docstring that pybind wrote."""
    found = [[(name, default != "") for name, default in _PARAMETER.findall(match[1])] for match in _OVERLOAD.finditer(function.__doc__)]
    assert found, function.__doc__
    return found


def public(thing):
    return [name for name in dir(thing) if not name.startswith("_")]


class Bench:
    """Arguments by name for one of the two ops, with its own files and tensors."""

    def __init__(self, aio, pin, folder):
        self.aio, self.handle, self.pin = aio, aio.aio_handle(4096, 8, False, True, 2), pin.pin_handle()
        folder.mkdir()
        self.path = folder / "data"
        self.path.write_bytes(bytes(range(256)) * (SIZE // 256))
        self.fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)

    def call(self, owner, method, names, by_name, asynchronous):
        arguments = self.arguments(asynchronous)
        positional = [] if by_name else [arguments[name] for name in names]
        named = {name: arguments[name] for name in names} if by_name else {}
        result = getattr({"aio": self.handle, "pin": self.pin}[owner], method)(*positional, **named)
        waited = self.handle.wait() if asynchronous or method.startswith("async_") else None
        if isinstance(result, torch.Tensor):
            result = (result.shape, result.dtype, result.device.type, result.stride(), result.data_ptr() % 4096, result.requires_grad)
        return type(result), result, waited, bytes(self.buffer.numpy()), self.path.read_bytes()

    def arguments(self, asynchronous):
        self.buffer = self.handle.new_cpu_locked_tensor(SIZE, torch.empty(0, dtype=torch.uint8)).fill_(7)
        locked = self.pin.new_cpu_locked_tensor(100, torch.empty(0, dtype=torch.bfloat16))
        return {
            "buffer": self.buffer,
            "filename": str(self.path),
            "fd": self.fd,
            "file_offset": 0,
            "validate": False,
            "async": asynchronous,
            "num_elem": 33,
            "example_tenosr": torch.empty(2, 2, dtype=torch.float16),
            "example_tensor": torch.empty(2, 2, dtype=torch.float16),
            "tensor": locked,
            "locked_tensor": locked,
            "address": locked.data_ptr(),
        }


@pytest.fixture(scope="module")
def benches(served, compiled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("surface")
    return [
        Bench(served("async_io"), served("pin_memory"), folder / "ours"),
        Bench(compiled("async_io"), compiled("pin_memory"), folder / "theirs"),
    ]


def ways(parameters):
    """Every way to call: all arguments by position, all by name, and without those that have defaults."""
    names = [name for name, _ in parameters]
    needed = [name for name, default in parameters if not default]
    return [(names, False), (names, True), (needed, False), (needed, True)]


@pytest.mark.parametrize("owner, op, kind", [("aio", "async_io", "aio_handle"), ("pin", "pin_memory", "pin_handle")])
def test_every_method_gives_the_same_in_every_way_to_call_it(benches, compiled, owner, op, kind):
    called = 0
    for method in public(getattr(compiled(op), kind)):
        if method == "wait":
            continue  # All asynchronous calls include it; a separate call makes DeepSpeed's op end the process.
        for parameters in overloads(getattr(getattr(compiled(op), kind), method)):
            for names, by_name in ways(parameters):
                for asynchronous in (False, True) if "async" in names else (None,):
                    seen = [bench.call(owner, method, names, by_name, asynchronous) for bench in benches]
                    assert seen[0] == seen[1], (method, names, by_name, asynchronous)
                    called += 1
    assert called >= {"aio": 70, "pin": 16}[owner]


def test_the_constructor_and_its_getters(served, compiled):
    for arguments in ((), (4096,), (8192, 16, True, True, 4), (1 << 20, 8, False, True, 1)):
        ours, theirs = (module("async_io").aio_handle(*arguments) for module in (served, compiled))
        getters = [name for name in public(theirs) if name.startswith("get_")]
        assert len(getters) == 6
        assert [getattr(ours, name)() for name in getters] == [getattr(theirs, name)() for name in getters]
    (parameters,) = overloads(compiled("async_io").aio_handle.__init__)
    named = dict(zip([name for name, _ in parameters], (8192, 16, True, False, 2)))
    assert served("async_io").aio_handle(**named).get_alignment() == 1024


def test_the_functions_of_the_module(served, compiled, tmp_path):
    assert public(compiled("async_io")) == list(public(served("async_io")))
    assert public(compiled("pin_memory")) == public(served("pin_memory"))
    data = (torch.arange(SIZE) % 251).to(torch.uint8)
    for module in (served, compiled):
        aio = module("async_io")
        buffer = aio.aio_handle().new_cpu_locked_tensor(SIZE, data)
        buffer.copy_(data)
        path = str(tmp_path / module.__name__)
        assert aio.aio_write(buffer, path, 4096, 4, False, True, False) == 0
        buffer.zero_()
        assert aio.aio_read(buffer, path, 4096, 4, False, True, False) == 0
        assert torch.equal(buffer, data)
        copy = torch.zeros(1024)
        assert aio.deepspeed_memcpy(copy, torch.arange(1024.0)) == 0 and torch.equal(copy, torch.arange(1024.0))
        with pytest.raises(TypeError):
            aio.aio_read(buffer, path)


def test_the_copy_takes_any_size_and_refuses_unequal_ones(served):
    """DeepSpeed's function copies 64 floats too many for some sizes, such as 1000, and counts
    rows instead of elements."""
    copy = served("async_io").deepspeed_memcpy
    for size in (0, 1, 64, 127, 4096 + 65):
        target, source = torch.zeros(size + 64), torch.rand(size)
        assert copy(target[:size], source) == 0
        assert torch.equal(target[:size], source) and not target[size:].any()
    square = torch.zeros(3, 5)
    copy(square, torch.arange(15.0).view(5, 3))
    assert torch.equal(square.flatten(), torch.arange(15.0))
    for wrong in (torch.zeros(16), torch.zeros(15, dtype=torch.int32), None):
        with pytest.raises(spillway.InvalidArgumentError):
            copy(square, wrong)


def methods_in(text, declarations):
    """{method: number of arguments} that a version's sources bind, counted in the C++ declarations of the class."""
    text, declarations = re.sub(r"\s+", " ", text), re.sub(r"\s+", " ", declarations)
    found = {}
    for name in re.findall(r'[^m]\.def\( ?"(\w+)"', text):
        declared = re.search(rf"\b{name}\(([^)]*)\)", declarations)
        assert declared, name
        found[name] = len([part for part in declared[1].split(",") if part.strip()])
    return found


def test_every_method_of_the_oldest_version_is_there_with_as_many_arguments(served, oldest_deepspeed, tmp_path):
    folder = oldest_deepspeed / "deepspeed" / "ops" / "csrc" / "aio" / "py_lib"
    methods = methods_in((folder / "py_ds_aio.cpp").read_text(), (folder / "deepspeed_py_aio_handle.h").read_text())
    assert len(methods) == 16 and methods["pread"] == 4 and methods["sync_pread"] == 2
    handle = served("async_io").aio_handle(1 << 20, 8, False, True, 2)
    for method, count in methods.items():
        (tmp_path / "data").write_bytes(bytes(SIZE))
        buffer = handle.new_cpu_locked_tensor(SIZE, torch.empty(0, dtype=torch.uint8))
        if method == "free_cpu_locked_tensor":
            arguments = [buffer]
        elif method == "new_cpu_locked_tensor":
            arguments = [10, buffer]
        else:
            arguments = [buffer, str(tmp_path / "data"), False, False][:count]
        assert len(arguments[:count]) == count
        assert getattr(handle, method)(*arguments[:count]) is not None, method
        handle.wait()


def test_every_method_of_gds_is_there(served):
    import deepspeed

    root = pathlib.Path(deepspeed.__file__).parent / "ops" / "csrc"
    text = re.sub(r"\s+", " ", (root / "gds" / "py_lib" / "py_ds_gds.cpp").read_text())
    methods = re.findall(r'\.def\( ?"(\w+)"', text)
    assert len(set(methods)) >= 21 and set(methods) <= set(public(served("gds").gds_handle))
    for method, names in ((part.split('"')[1], re.findall(r'"(\w+)"_a', part)) for part in text.split(".def(")[2:]):
        accepted = getattr(served("gds").gds_handle, method).__code__.co_varnames
        assert all(name in accepted or name in ("async", "file_offset") for name in names), (method, names)


def test_gds_serves_tensors_in_host_memory(served, tmp_path):
    handle = served("gds").gds_handle(block_size=4096, intra_op_parallelism=4)
    assert (handle.get_alignment(), handle.get_intra_op_parallelism()) == (512, 4)
    tensor = handle.new_pinned_device_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    assert (tensor.shape, tensor.dtype) == ((1000,), torch.bfloat16)
    tensor.copy_(torch.arange(1000) % 100)
    assert handle.pin_device_tensor(tensor) is True
    assert handle.sync_pwrite(tensor, str(tmp_path / "data")) == 1
    copy = torch.zeros_like(tensor)
    assert handle.async_pread(copy, str(tmp_path / "data")) == 0 and handle.wait() == 1
    assert torch.equal(tensor, copy)
    assert handle.unpin_device_tensor(tensor) is True and handle.free_pinned_device_tensor(tensor) is True
