"""Stale gradients: reproduces DeepSpeed's treatment, with states in host memory, of parameters without a gradient since
the last step. DeepSpeed steps the whole sub-group, with the gradient of such a parameter's last step, which every step
scales again."""


class Gradients:
    """The stale gradients of one TierSwapper."""

    def __init__(self, swapper):
        self._swapper = swapper
        # Per parameter: the product of the factors since its gradient arrived, and, from the first step without a new
        # gradient on, the scaled gradient.
        self._factor, self._old = {}, {}

    def forget(self, param):
        """Called when a parameter has a new gradient."""
        self._factor.pop(param, None)
        self._old.pop(param, None)

    def of(self, param):
        """What the parameter steps with, before this step's factor; None if it is where gradients are summed up."""
        factor = self._factor.get(param, 1.0)
        if param not in self._old and factor != 1.0:
            self._old[param] = self._swapper.summed_up(param).float().mul_(factor)
        return self._old.get(param)

    def edited(self, param, gradient):
        """Stores a gradient that was set by the user, outside the accumulation buffer."""
        self._old[param] = gradient.detach().float().clone()

    def stepped(self, factor):
        """Applies a step's factor to every gradient."""
        if factor == 1.0:
            return
        for old in self._old.values():
            old.mul_(factor)
        for _, param in self._swapper.params():
            if param not in self._old:
                self._factor[param] = factor
