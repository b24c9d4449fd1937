"""Base of structs with input of the caller."""

from ctypes import Structure, c_int32, c_uint32, c_uint64

_RANGES = {c_uint32: (0, 2**32 - 1), c_uint64: (0, 2**64 - 1), c_int32: (-2**31, 2**31 - 1)}


class _Checked(type(Structure)):
    def __init__(cls, name, bases, body):
        super().__init__(name, bases, body)
        for field, kind, *_ in body.get("_fields_", ()):
            if kind in _RANGES:
                setattr(cls, field, _Integer(field, getattr(cls, field), *_RANGES[kind]))


class Given(Structure, metaclass=_Checked):
    """Base of structs with user input: an integer that does not fit its field is an error, where ctypes truncates
    it."""


class _Integer:
    """A field that refuses what does not fit. Fields of floats and addresses stay those of ctypes, without Python code per access."""

    def __init__(self, name, field, least, most):
        self._name, self._field, self._least, self._most = name, field, least, most
        self.offset, self.size = field.offset, field.size

    def __get__(self, instance, owner=None):
        return self if instance is None else self._field.__get__(instance, owner)

    def __set__(self, instance, value):
        if isinstance(value, int) and not self._least <= value <= self._most:
            # Here, so that a program may read the layouts from this folder alone.
            from ..errors import InvalidArgumentError
            raise InvalidArgumentError(f"{self._name} is {value}; pass a number from {self._least} to {self._most}")
        self._field.__set__(instance, value)
