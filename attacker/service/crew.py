"""Starts worker processes, gives them the jobs that wait, and sees to it that every job comes to an end of its own."""

import logging
import os
import secrets
import sqlite3
import threading
import time
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue

from attacker.service.errands import Errand, Said
from attacker.service.hands import Hand
from attacker.service.names import folder_of
from attacker.service.previews import PARTIAL, path_of
from attacker.service.queue import Claim, Fenced, Queue
from attacker.service.resources import measurable
from attacker.service.running import Running
from attacker.service.settings import Settings
from fedsim.wire.files import alone, make_private

log = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between two looks at the queue and at the workers, where nothing happens."""
IDLE = 120.0
"""Seconds after which a worker without a job is ended; another one takes some seconds to import PyTorch."""
ERRANDS = 200
"""Jobs after which a worker is replaced: whatever it holds on to is given back."""


class Crew:
    """The workers of a service, under one thread of its process."""

    def __init__(self, settings: Settings, queue: Queue) -> None:
        self.settings, self.queue = settings, queue
        self.owner = secrets.token_hex(8)
        self._said: SimpleQueue[tuple[Hand, Said | None]] = SimpleQueue()
        self._running: dict[Hand, Running] = {}
        self._idle: list[Hand] = []
        self._claimed: Claim | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._held = ExitStack()

    @cached_property
    def size(self) -> int:
        """How many jobs run at once."""
        if self.settings.workers is not None:
            return self.settings.workers
        if self.settings.ray is not None:
            return 1
        if self.settings.device.startswith("cuda"):
            return max(1, len(self._gpus))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // self.settings.threads)

    @cached_property
    def _gpus(self) -> list[str]:
        """Those that workers share out among them; none where the user named one, or works on the CPU."""
        if self.settings.device != "cuda":
            return []
        import torch

        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        return seen.split(",") if seen else [str(gpu) for gpu in range(torch.cuda.device_count())]

    @property
    def busy(self) -> int:
        """How many jobs run now."""
        return len(self._running)

    def start(self) -> None:
        """Take up the jobs of a service that was killed, and begin to work.

        Raises ValueError where another service works in the same folder of state, or a limit cannot be watched.
        """
        if self.settings.job_megabytes is not None and not measurable():
            raise ValueError("--job-megabytes needs a system that tells in /proc what a process takes")
        state = make_private(self.settings.state_folder)
        self._held.enter_context(alone(state / "service.lock"))
        for path in make_private(state / "previews").iterdir():
            path.unlink()
        make_private(state / "locks")
        if again := self.queue.recover(self.owner):
            log.info("%d jobs of a service that was killed wait again", again)
        if self.size:
            self._thread = threading.Thread(target=self._work, name="crew", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End all workers. Their jobs wait for the next service, which goes on from their checkpoints."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._held.close()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
                self._watch()
                self._hire()
            except Exception:  # a full disk, say: what workers answered is kept until it can be written
                log.exception("the crew goes on after")
                self._stopping.wait(1.0)
        self._end_all()

    def _end_all(self) -> None:
        for hand in [*self._running, *self._idle]:
            hand.end()
        for running in self._running.values():
            if running.end is None:
                running.released()
            try:
                running.settle()
            except Exception:  # the next service takes it up
                log.exception("job %s", running.claim.id)
        if self._claimed is not None:
            with suppress(Fenced, sqlite3.Error):  # as above
                self.queue.released(self._claimed)

    def _listen(self) -> None:
        """Hear all that workers have said by now."""
        try:
            hand, said = self._said.get(timeout=TICK)
            while True:
                self._hear(hand, said)
                hand, said = self._said.get_nowait()
        except Empty:
            pass
        for running in [running for running in self._running.values() if running.settle()]:
            self._over(running)

    def _hear(self, hand: Hand, said: Said | None) -> None:
        running = self._running.get(hand)
        if said is None:
            if running is not None and running.end is None:
                running.died(hand.last_words())
            elif running is None:
                self._fire(hand)
        elif said.ready:
            hand.ready = True
            if running is not None:
                running.ready()
        elif running is not None and said.answer is not None:
            running.answered(said.answer)
        elif running is not None and said.progress is not None:
            try:
                running.progress(said.progress)
            except Fenced:
                hand.kill()

    def _over(self, running: Running) -> None:
        """What became of a job is written down."""
        hand, claim = running.hand, running.claim
        del self._running[hand]
        preview = path_of(self.settings.state_folder, claim.id)
        for path in (preview, preview.with_suffix(PARTIAL), self._lock(claim)):
            path.unlink(missing_ok=True)
        if hand.is_alive and running.asked is None and hand.errands < ERRANDS:
            hand.idle_since = time.monotonic()
            self._idle.append(hand)
        else:  # where it was asked to end a job, a signal may still be on its way to it
            self._fire(hand)

    def _fire(self, hand: Hand) -> None:
        if hand in self._idle:
            self._idle.remove(hand)
        hand.end()

    def _watch(self) -> None:
        cancelled = self.queue.asked_to_end(running.claim for running in self._running.values()) if self._running else set()
        for running in self._running.values():
            running.watch(cancelled=running.claim.id in cancelled)
        for hand in [hand for hand in self._idle if time.monotonic() - hand.idle_since > IDLE]:
            self._fire(hand)

    def _hire(self) -> None:
        """Give jobs that wait to workers, as long as there are any of both."""
        while len(self._running) < self.size and (claim := self._claimed or self.queue.claim(self.owner)):
            self._claimed = claim  # where there is no worker to be had, or nothing can be written, it is tried again
            with suppress(Fenced):
                self._begin(claim)
            self._claimed = None

    def _begin(self, claim: Claim) -> None:
        """Give a job to a worker. Raises OSError, and others, where there are no more processes, say."""
        try:
            errand = self._errand(claim)
        except ValueError as error:
            self.queue.failed(claim, str(error))
            return
        hand = self._hand(claim.spec.recording)
        limits = {"seconds": self.settings.job_seconds, "megabytes": self.settings.job_megabytes}
        self._running[hand] = Running(self.queue, claim, hand, **limits)
        hand.give(errand)

    def _hand(self, recording: str) -> Hand:
        """A worker for a recording: one that has done jobs of it before, or a new one in place of one of another."""
        for hand in self._idle:
            if hand.recording == recording and hand.is_alive:
                self._idle.remove(hand)
                return hand
        while self._idle and len(self._idle) + len(self._running) >= self.size:
            self._fire(min(self._idle, key=lambda hand: hand.idle_since))
        used = {hand.gpu for hand in [*self._running, *self._idle]}
        gpu = next((gpu for gpu in self._gpus if gpu not in used), None)
        return Hand(recording, self._said, threads=self.settings.threads, gpu=gpu)

    def _errand(self, claim: Claim) -> Errand:
        """Raises ValueError where the recording is no longer there."""
        settings, run = self.settings, folder_of(self.settings.folder, claim.spec.recording)
        return Errand(
            job=claim.id,
            spec=claim.spec.model_dump(mode="json"),
            run=str(run),
            truth=tuple(str(folder.absolute()) for folder in settings.truth_of(run)),
            lock=str(self._lock(claim)),
            preview=str(path_of(settings.state_folder, claim.id)),
            threads=settings.threads,
            device=settings.device,
            ray=settings.ray,
            model=settings.model,
        )

    def _lock(self, claim: Claim) -> Path:
        return self.settings.state_folder / "locks" / claim.id
