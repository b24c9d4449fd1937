"""A process that owns a tier. It reads calls from its standard input, one a line, and answers each with one line of JSON.

    owner.py SETTINGS      the arguments of spillway.Tier, as JSON

Each of EXTENTS extents holds the number of the step that wrote it, mixed with the position of each word."""

import json
import sys
import time

import numpy as np

import spillway

EXTENTS, WORDS = 3, 1 << 18
POSITIONS = np.arange(WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class Owner:
    def __init__(self, settings):
        self.settings, self.tier, self.tickets, self.kept = settings, None, [], []

    def open(self):
        self.tier = spillway.Tier(**self.settings)
        return self.tier.opened.step

    def put(self, step, path=None):
        for extent in range(EXTENTS):
            array = POSITIONS ^ np.uint64(int(step) * 1000 + extent)
            self.kept.append(array)
            self.tickets.append(
                self.tier.put(self.tier.define(f"extent-{extent}", [array.nbytes]), [array], path=None if path is None else int(path))
            )

    def wait(self):
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            self.tier.wait(ticket)

    def commit(self, step):
        self.tier.commit(int(step), payload=step.encode())
        self.tickets, self.kept = [], []

    def store(self, step, path=None):
        self.put(step, path)
        self.wait()

    def step(self, step):
        self.store(step)
        self.commit(step)

    def run(self, step):
        """Commits steps, and says each, until the process is killed."""
        step = int(step)
        while True:
            self.step(str(step))
            say(committed=step)
            step += 1

    def read(self):
        """The step in each extent; None where the words are of several steps."""
        found = []
        for extent in range(EXTENTS):
            array = np.zeros(WORDS, np.uint64)
            self.tier.wait(self.tier.get(self.tier.define(f"extent-{extent}", [array.nbytes]), [array]))
            words = (array ^ POSITIONS) - np.uint64(extent)
            found.append(int(words[0]) // 1000 if (words == words[0]).all() and words[0] % np.uint64(1000) == 0 else None)
        return found

    def verify(self):
        return self.tier.verify()

    def health(self):
        return [path.health for path in self.tier.paths()]

    def rollback(self):
        self.tier.rollback()
        self.tickets, self.kept = [], []

    def close(self, seconds="60"):
        self.tier.close(float(seconds))

    def destroy(self):
        self.tier.destroy()


def say(**answer):
    print(json.dumps(answer), flush=True)


def main():
    owner = Owner(json.loads(sys.argv[1]))
    for line in sys.stdin:
        call, *arguments = line.split()
        began = time.monotonic()
        try:
            answer = {"result": getattr(owner, call)(*arguments), "status": 0, "text": ""}
        except spillway.SpillwayError as error:
            answer = {"result": None, "status": error.status, "text": str(error)}
        say(**answer, seconds=time.monotonic() - began)


main()
