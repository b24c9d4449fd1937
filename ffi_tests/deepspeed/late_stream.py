"""A stand-in for a device's stream, whose copies are done a millisecond after their start."""

import threading
import time


class Stream:
    """A stream, and an event of it."""

    #: Waits of the main thread.
    waits = 0

    def record_event(self):
        return Stream()

    def synchronize(self):
        Stream.waits += threading.current_thread() is threading.main_thread()
        time.sleep(0.001)


def install():
    """Gives DeepSpeed's CPU such a stream."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).current_stream = lambda self, device_index=None: Stream()
