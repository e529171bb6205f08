"""The thread that uses the device and generates the texts of all clients together."""

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rmt_tpu import memory
from rmt_tpu.data import Tokenizer
from rmt_tpu.errors import RmtError, one_line
from rmt_tpu.generation import Completion, Draft, Engine, NewTokens, Request, Scores
from rmt_tpu.streams import log_line


class Piece(NamedTuple):
    """A newly generated piece of a text.

    Attributes:
      index: the index of the text in its job.
      completion: the new piece.
      prompt: the scores of the prompt's tokens, in the first piece of a text, if they were
        requested; otherwise None.
    """

    index: int
    completion: Completion
    prompt: Scores | None


class Job:
    """The texts that one client is waiting for.

    Args:
      requests: one request per text.
      stop: stop strings; a text ends before the first stop string in it.
      deliver: a callback that receives each new piece of a text, or an exception if the job has
        failed. It is called in the worker's thread.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        stop: Sequence[str],
        deliver: Callable[[Piece | Exception], None],
    ):
        self.requests, self.stop, self.deliver = requests, stop, deliver
        self.numbers: list[int] = []


class Worker(threading.Thread):
    """The thread that owns the engine. No other thread may use the engine.

    Attributes:
      error: the exception that ended the thread; None if the thread is running or was stopped.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        super().__init__(name="engine", daemon=True)
        self.error: Exception | None = None
        self._engine, self._tokenizer = engine, tokenizer
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Maps the engine's number of a request to the request's job, the index of its text within
        # the job, and the text generated so far.
        self._open: dict[int, tuple[Job, int, Draft]] = {}

    @property
    def slots(self) -> int:
        """The number of texts that can be generated at the same time."""
        return self._engine.slots

    @property
    def slots_used(self) -> int:
        """The number of slots in which a text is being generated. Any thread may read it."""
        return sum(number is not None for number in self._engine.numbers)

    def submit(self, job: Job) -> None:
        """Queue the job's texts until slots are free."""
        self._orders.put(lambda: self._start_job(job))

    def cancel(self, job: Job) -> None:
        """Cancel a job; its slots become free after the current step."""
        self._orders.put(lambda: self._forget(job))

    def stop(self) -> None:
        """Stop the thread after the current step, and wait for it."""
        self._orders.put(None)
        self.join()

    def run(self) -> None:
        """Run the engine until `stop` is called.

        An exception ends all texts in progress with an error, and the engine starts afresh.
        """
        try:
            while self._take_orders():
                self._step()
        # `_step` raises an exception only if resetting the engine failed.
        except Exception as error:
            self.error = error
            self._fail(error)

    def _take_orders(self) -> bool:
        """Run all queued orders (submit, cancel, stop); if the engine is idle, wait for an order.

        Returns:
          False if `stop` has been called.
        """
        while True:
            try:
                order = self._orders.get(block=not self._engine.open_requests)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _step(self) -> None:
        try:
            for new_tokens in self._engine.step():
                if new_tokens.number in self._open:
                    self._deliver(new_tokens)
        except Exception as error:
            if not isinstance(error, RmtError) and not memory.is_out(error):
                traceback.print_exception(error)
            reason = self._fail(error)
            log_line(f"error: {reason}: all requests in progress failed")
            self._engine.reset()

    def _start_job(self, job: Job) -> None:
        """Submit the requests of a job. If the engine refuses one, the job gets the error."""
        for index, request in enumerate(job.requests):
            try:
                number = self._engine.submit(request)
            except RmtError as error:
                self._forget(job)
                job.deliver(RuntimeError(one_line(error)))
                return
            job.numbers.append(number)
            draft = Draft(index, self._tokenizer, job.stop, request.adjustment.min_tokens)
            self._open[number] = job, index, draft

    def _forget(self, job: Job) -> None:
        for number in job.numbers:
            if self._open.pop(number, None):
                self._engine.forget(number)

    def _deliver(self, new_tokens: NewTokens) -> None:
        job, index, draft = self._open[new_tokens.number]
        completion = draft.add(new_tokens)
        if completion.finish:
            del self._open[new_tokens.number]
            self._engine.forget(new_tokens.number)
        job.deliver(Piece(index, completion, new_tokens.prompt))

    def _fail(self, error: Exception) -> str:
        """Report an error to all open jobs, and return its description in one line."""
        reason = "out of memory" if memory.is_out(error) else one_line(error)
        jobs = {id(job): job for job, _, _ in self._open.values()}
        self._open.clear()
        for job in jobs.values():
            job.deliver(RuntimeError(reason))
        return reason
