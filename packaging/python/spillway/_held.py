"""The base of what holds an object of the library: opened once, closed once, in a with block or at the end of its life."""

import ctypes

from . import _native
from .errors import InvalidArgument


class Held:
    """A subclass names what messages call it, and the function that ends the object."""

    what = "object"
    closer = ""
    _handle = None

    def _hold(self, opener, *arguments):
        handle = ctypes.c_void_p()
        _native.check(getattr(_native.library(), opener)(*arguments, ctypes.byref(handle)))
        self._handle = handle

    @property
    def handle(self):
        """What C knows it by."""
        if not self._handle:
            raise InvalidArgument(f"the {self.what} is closed")
        return self._handle

    def _call(self, function, *arguments):
        _native.check(getattr(_native.library(), function)(self.handle, *arguments))

    def _end(self, *arguments):
        """Calls the closer; False if the object is closed already."""
        handle, self._handle = self._handle, None
        if handle:
            _native.check(getattr(_native.library(), self.closer)(handle, *arguments))
        return bool(handle)

    def close(self):
        """Ends the object; a second call does nothing."""
        self._end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if self._handle:
            self.close()
