"""What the doctor has found in a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import InvalidArgumentError


class JobPart(NamedTuple):
    """A part of a job: what it is, where the job asks for it, and why Spillway does not serve it; None: Spillway does."""

    name: str
    where: str
    reason: str | None = None


class Obstacle(NamedTuple):
    """What stands against a job, and its cure. `refuses`: Spillway refuses the job until it is cured."""

    text: str
    cure: str
    refuses: bool = False


@dataclass
class Findings:
    """The findings about a job.

    Attributes:
        what: The kind of the job.
        parts: What it uses.
        obstacles: What stands against it.
        lines: The lines to add.
        strategy: The planner's name of what the job does now.
        choices: The planner's names of what Spillway has for such a job.
        plan: Options of the planner that the job has.
        in_use: The names of Spillway that the job uses.
        directories: The directories of the tier or of the swap files.
        frameworks: The packages that the job needs."""

    what: str
    parts: list[JobPart] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    strategy: str = "gpu"
    choices: tuple[str, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    in_use: tuple[str, ...] = ()
    directories: list[str] = field(default_factory=list)
    frameworks: tuple[str, ...] = ()

    @property
    def is_served(self) -> bool:
        """True if Spillway serves a part of the job, and refuses nothing."""
        return any(part.reason is None for part in self.parts) and not any(obstacle.refuses for obstacle in self.obstacles)

    def refuse(self, text: str, cure: str) -> None:
        """Notes what Spillway refuses."""
        self.obstacles.append(Obstacle(text, cure, True))

    def add(self, other: Findings) -> None:
        """Takes what was found in a part of the job."""
        self.parts += [part for part in other.parts if part not in self.parts]
        self.obstacles += other.obstacles
        self.lines += [line for line in other.lines if line not in self.lines]
        self.directories += other.directories
        self.frameworks = (*self.frameworks, *(name for name in other.frameworks if name not in self.frameworks))
        self.strategy, self.choices, self.plan = other.strategy, other.choices, other.plan


def shown(value: Any) -> str:
    """A value of a job in a message: one line of at most 60 letters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def an_object(value: Any, name: str) -> dict[str, Any]:
    """The value of an object in a configuration; None stands for an empty one.

    Raises:
        InvalidArgumentError: It is something else."""
    if value is not None and not isinstance(value, dict):
        raise InvalidArgumentError(f"{name} is {shown(value)}, not an object; write its settings into {{}}, or take it out")
    return value or {}
