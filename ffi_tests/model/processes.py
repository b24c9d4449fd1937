"""Processes of an episode: they are forked and watched, and their exits are checked. Also lists the
resources of a process."""

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
import traceback

from .episode import HANG, Defect

DEFECT, BROKEN = 3, 4


class Child:
    """A forked process that runs `body(child, *arguments)`. A pipe returns its messages and then the result.

    `body` may send JSON lines by child.send."""

    def __init__(self, episode, body, *arguments, name="child", group=False):
        self.episode, self.name, self._buffer, self.said = episode, name, b"", []
        self.status = None
        incoming, outgoing = os.pipe()
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(incoming)
            if episode.out is not None:
                # Otherwise the parent's end would be noticed only at the end of this child.
                os.close(episode.out)
            self._out = episode.out = outgoing
            _run_child(self, body, arguments)
        os.close(outgoing)
        self._in = incoming
        episode.children.append(self)

    def send(self, **message):
        os.write(self._out, (json.dumps(message) + "\n").encode())

    def read(self, seconds):
        """The next message, or None at the end of the child; a Defect if none arrives in time."""
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                self.stack_and_kill()
                raise Defect(f"{self.name} said nothing for {seconds:.0f} s")
            piece = os.read(self._in, 1 << 16)
            if not piece:
                return None
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        message = json.loads(line)
        for key, number in message.pop("counts", {}).items():
            self.episode.counts[key] += number
        return message

    def expect(self, word, seconds=30):
        """Reads messages until one with this word arrives, and returns it."""
        while True:
            message = self.read(seconds)
            if message is None:
                self.end(30)
                raise Defect(f"{self.name} ended before it said {word!r}")
            self.said.append(message)
            if message.get("word") == "defect":
                self.end(30)
            if message.get("word") == word:
                return message

    def wait_readable(self, seconds):
        """Waits until the child sends a message or the time is over."""
        return bool(self._buffer) or bool(select.select([self._in], [], [], seconds)[0])

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def stack_and_kill(self):
        try:
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGABRT)
            time.sleep(0.3)
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def end(self, seconds=30, allowed=()):
        """Waits for the end, which must be exit status 0 or one of the `allowed` signals.
        Returns the unread messages."""
        rest = []
        while self._in is not None:
            message = self.read(seconds)
            if message is None:
                os.close(self._in)
                self._in = None
            else:
                rest.append(message)
        self._reap(seconds)
        self.said += rest
        for message in self.said:
            if message.get("word") == "defect":
                raise Defect(f"{self.name}: {message['text']}")
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            if number not in allowed:
                raise Defect(f"{self.name} was killed by {signal.Signals(number).name}")
        elif os.WEXITSTATUS(self.status) == HANG:
            raise Defect(f"{self.name} hung in a call")
        elif os.WEXITSTATUS(self.status):
            raise Defect(f"{self.name} ended with exit status {os.WEXITSTATUS(self.status)}")
        return rest

    def _reap(self, seconds):
        end = time.monotonic() + seconds
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
            elif time.monotonic() > end:
                # No wait follows: a process inside a frozen file system does not die.
                os.kill(self.pid, signal.SIGKILL)
                raise Defect(f"{self.name} did not end within {seconds:.0f} s")
            else:
                time.sleep(0.002)


def _run_child(child, body, arguments):
    code, episode = 0, child.episode
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.enable()
    episode.begin_process()
    try:
        episode.watch()
        body(child, *arguments)
        child.send(word="counts", counts=dict(episode.counts))
    except Defect as defect:
        child.send(word="defect", text=str(defect), counts=dict(episode.counts))
        code = DEFECT
    except BaseException:
        child.send(word="defect", text="the model itself failed: " + traceback.format_exc())
        code = BROKEN
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def holdings():
    """The resources of this process: descriptors, threads, locked bytes, mappings of files, and names in /dev/shm."""
    gc.collect()
    found = {}
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass
    found["descriptors"] = sorted(name.split(" ")[0] for name in files if "/proc/" not in name)
    found["threads"] = len(os.listdir("/proc/self/task"))
    found["locked KiB"] = status_number("VmLck")
    return found


def status_number(name):
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(name + ":"):
                return int(line.split()[1])
    return 0


def left_over(before, seconds=30.0):
    """The resources that are held now and were not held `before`, after a short wait; None if there are none."""
    end = time.monotonic() + seconds
    while True:
        now = holdings()
        more = []
        extra = list(now["descriptors"])
        for name in before["descriptors"]:
            if name in extra:
                extra.remove(name)
        if extra:
            more.append(f"descriptors {extra[:5]}")
        for key in ("threads", "locked KiB"):
            if now[key] > before[key]:
                more.append(f"{now[key] - before[key]} more {key}")
        if not more:
            return None
        if time.monotonic() > end:
            return ", ".join(more)
        time.sleep(0.02)
