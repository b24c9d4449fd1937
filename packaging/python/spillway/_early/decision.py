"""Whether a step starts during backward, or waits for step(). Two reasons have it wait:

- The program does what no such step can follow, as a second backward or a use of the states. Then this step waits, from that moment on.
- The last steps in a row were in vain: the verdict has had them repeated, or the program has had them taken back. Such a step costs more
  than one that waits. So steps wait until one would not have been in vain."""

from __future__ import annotations

#: The steps in a row that are made in vain before the next ones wait.
_IN_A_ROW = 2


class Decision:
    """The decision of one optimizer.

    Attributes:
        waits: This step waits: nothing of it starts any more, and nothing is noted for it. The next step has another value."""

    def __init__(self) -> None:
        self.waits, self._in_vain = False, 0

    @property
    def steps_early(self) -> bool:
        """True if a bucket is stepped once its gradients are there."""
        return not self.waits and self._in_vain < _IN_A_ROW

    def taken_back(self) -> None:
        """What had started of a step was in vain: it was taken back."""
        self._in_vain += 1

    def judge(self, repeats: bool) -> None:
        """A step has its verdict, which repeats what has started, or would have started. A step that waits because of the program shows
        nothing of that."""
        if not self.waits:
            self._in_vain = self._in_vain + 1 if repeats else 0
