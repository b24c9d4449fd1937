"""Base of structs with input of the caller."""

from ctypes import Structure, c_int32, c_uint32, c_uint64

_RANGES = {c_uint32: (0, 2**32 - 1), c_uint64: (0, 2**64 - 1), c_int32: (-2**31, 2**31 - 1)}


class Given(Structure):
    """Base of structs with user input: an integer that does not fit its field is an error, where ctypes truncates
    it."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._ranges = {name: _RANGES[kind] for name, kind, *_ in cls._fields_ if kind in _RANGES}

    def __setattr__(self, name, value):
        least, most = self._ranges.get(name, (None, None))
        if least is not None and isinstance(value, int) and not least <= value <= most:
            # Here, so that a program may read the layouts from this folder alone.
            from ..errors import InvalidArgumentError
            raise InvalidArgumentError(f"{name} is {value}; pass a number from {least} to {most}")
        super().__setattr__(name, value)
