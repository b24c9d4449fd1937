"""Gradients of parameters that had none since the last step, as DeepSpeed has them with states in host memory: it steps a
whole sub-group, with the gradient that such a parameter had in its last step, scaled then, and scaled again in each step."""


class Gradients:
    """Those of one TierSwapper."""

    def __init__(self, swapper):
        self._swapper = swapper
        # Factors on the gradient of a parameter since it came; from the first step without one, the product.
        self._factor, self._old = {}, {}

    def forget(self, param):
        """A new gradient has come."""
        self._factor.pop(param, None)
        self._old.pop(param, None)

    def of(self, param):
        """What the parameter steps with, before this step's factor; None if it is where gradients are summed up."""
        factor = self._factor.get(param, 1.0)
        if param not in self._old and factor != 1.0:
            self._old[param] = self._swapper.summed_up(param).float().mul_(factor)
        return self._old.get(param)

    def edited(self, param, gradient):
        """The gradient is not where gradients are summed up, since it was set."""
        self._old[param] = gradient.detach().float().clone()

    def stepped(self, factor):
        """Every gradient is scaled by a step."""
        if factor == 1.0:
            return
        for old in self._old.values():
            old.mul_(factor)
        for _, param in self._swapper.params():
            if param not in self._old:
                self._factor[param] = factor
