"""The thread that uses the device: it generates the texts of all clients together."""

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rmt_tpu import memory
from rmt_tpu.data import Tokenizer
from rmt_tpu.errors import RmtError, one_line
from rmt_tpu.generation import Completion, Draft, Engine, Request, Said, Scores
from rmt_tpu.streams import say


class Piece(NamedTuple):
    """A new part of a text.

    Attributes:
      index: the index of the text in its job.
      more: the new part.
      prompt: the scores of its prompt, given with the first part if they are wanted.
    """

    index: int
    more: Completion
    prompt: Scores | None


class Job:
    """The texts that one client waits for.

    Args:
      requests: a request for each text.
      stop: strings before any of which a text ends.
      tell: takes what has come of the texts, or why nothing more comes; called by the worker's
        thread.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        stop: Sequence[str],
        tell: Callable[[Piece | Exception], None],
    ):
        self.requests, self.stop, self.tell = requests, stop, tell
        self.numbers: list[int] = []


class Worker(threading.Thread):
    """The thread that has an engine, which no other thread may use.

    Attributes:
      error: why the thread ended, if it was not stopped.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        super().__init__(name="engine", daemon=True)
        self.error: Exception | None = None
        self._engine, self._tokenizer = engine, tokenizer
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Keyed by the engine's number of the request.
        self._open: dict[int, tuple[Job, int, Draft]] = {}

    def submit(self, job: Job) -> None:
        """Let the texts of a job wait for slots."""
        self._orders.put(lambda: self._begin(job))

    def cancel(self, job: Job) -> None:
        """Cancel a job that nobody waits for; its slots are free after the current step."""
        self._orders.put(lambda: self._forget(job))

    def stop(self) -> None:
        """End the thread after the current step."""
        self._orders.put(None)
        self.join()

    def run(self) -> None:
        try:
            while self._take_orders():
                self._step()
        except Exception as error:  # the engine could not even be reset
            self.error = error
            self._fail(error)

    def _take_orders(self) -> bool:
        """Run the orders in the queue, and wait for one if nothing else is to be done.

        Returns:
          False when the thread is to end.
        """
        while True:
            try:
                order = self._orders.get(block=not self._engine.open)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _step(self) -> None:
        try:
            for said in self._engine.step():
                if said.number in self._open:
                    self._tell(said)
        except Exception as error:
            if not isinstance(error, RmtError) and not memory.is_out(error):
                traceback.print_exception(error)
            reason = self._fail(error)
            say(f"error: {reason}: what was open has failed")
            self._engine.reset()

    def _begin(self, job: Job) -> None:
        for index, request in enumerate(job.requests):
            number = self._engine.submit(request)
            job.numbers.append(number)
            self._open[number] = job, index, Draft(index, self._tokenizer, job.stop)

    def _forget(self, job: Job) -> None:
        for number in job.numbers:
            if self._open.pop(number, None):
                self._engine.forget(number)

    def _tell(self, said: Said) -> None:
        job, index, draft = self._open[said.number]
        more = draft.more(said)
        if more.finish:
            del self._open[said.number]
            self._engine.forget(said.number)
        job.tell(Piece(index, more, said.prompt))

    def _fail(self, error: Exception) -> str:
        """Report an error to all jobs, and return the reason that they get."""
        reason = "out of memory" if memory.is_out(error) else one_line(error)
        jobs = {id(job): job for job, _, _ in self._open.values()}
        self._open.clear()
        for job in jobs.values():
            job.tell(RuntimeError(reason))
        return reason
