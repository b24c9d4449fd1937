"""Base of structs with input of the caller."""

from ctypes import Structure, c_void_p

from .integers import RANGES, between


class _Checked(type(Structure)):
    def __init__(cls, name, bases, body):
        super().__init__(name, bases, body)
        for field, kind, *_ in body.get("_fields_", ()):
            if kind in RANGES and kind is not c_void_p:
                setattr(cls, field, _Integer(field, getattr(cls, field), *RANGES[kind]))


class Given(Structure, metaclass=_Checked):
    """Base of structs with user input: an integer that does not fit its field is an error, where ctypes shortens it."""


class _Integer:
    """A field that refuses what does not fit. Fields of floats and addresses stay those of ctypes, without Python code per access."""

    def __init__(self, name, field, least, most):
        self._name, self._field, self._least, self._most = name, field, least, most
        self.offset, self.size = field.offset, field.size

    def __get__(self, instance, owner=None):
        return self if instance is None else self._field.__get__(instance, owner)

    def __set__(self, instance, value):
        if type(value) is not int or not self._least <= value <= self._most:
            value = between(self._name, value, self._least, self._most)
        self._field.__set__(instance, value)
