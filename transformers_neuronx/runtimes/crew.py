"""The worker processes of one start: commands to them, and their answers, until one is lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from transformers_neuronx import errors
from transformers_neuronx.errors import EngineError
from transformers_neuronx.runtimes.meeting import SILENCE
from transformers_neuronx.runtimes.wire import Bytes, Message, Wire
from transformers_neuronx.runtimes.worker_processes import Leader

Progress = Callable[[str], object]


class Answer(Future[Message]):
    """What a worker will say. Meanwhile it may say how far it is."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress


class Crew:
    """Workers that a leader has started. `lost` says why they are of no use any more, once that is so."""

    def __init__(self, leader: Leader) -> None:
        self._leader, self.lost = leader, ""
        self._numbers, self._losing = itertools.count(), threading.Lock()
        self._answers: dict[tuple[int, int], Answer] = {}  # by rank, and number of the command
        self._wires = leader.start()
        for rank, wire in enumerate(self._wires):
            threading.Thread(target=self._listen, args=(rank, wire), name=f"worker {rank}", daemon=True).start()

    def send(
        self,
        command: Mapping[str, Any],
        data: Sequence[Sequence[Bytes]] = (),
        ranks: range | None = None,
        answered: bool = False,
        progress: Progress = lambda done: None,
    ) -> list[Answer]:
        """Send a command to workers, by default all: with the same data, or each with its own. Return their answers.

        Only the first one tells its progress. Raises EngineError if a worker is lost.
        """
        number, answers = next(self._numbers), []
        ranks = range(len(self._wires)) if ranks is None else ranks
        for rank in ranks:
            if answered:
                self._answers[rank, number] = answer = Answer(progress if rank == ranks[0] else lambda done: None)
                answers.append(answer)
            own = data[rank] if len(data) > 1 else data[0] if data else ()
            try:
                self._wires[rank].send({**command, "number": number, "answered": answered}, own)
            except OSError as error:
                self._lose_rank(rank, error)
        if self.lost:
            self.lose(lambda: self.lost)  # answers that nobody else ends
            raise EngineError(self.lost)
        return answers

    def answers(self, asked: Sequence[Answer]) -> list[Message]:
        """Wait for answers. Raises the error of the first worker that has one, or why another has ended."""
        try:
            return [answer.result() for answer in asked]
        except EngineError as error:
            if not self.lost and (gone := self._leader.ended()):
                self.lose(lambda: gone)  # else what follows would be sent to these workers
            if self.lost:
                raise EngineError(self.lost) from error
            raise

    def lose(self, why: Callable[[], str]) -> None:
        """End all workers, since one is lost, and fail all answers that have not come."""
        with self._losing:
            if not self.lost:
                sentence = why()
                self._leader.end()
                self.lost = sentence  # now others may start the next ones
            for key in [*self._answers]:
                if answer := self._answers.pop(key, None):
                    answer.set_exception(EngineError(self.lost))

    def _lose_rank(self, rank: int, error: OSError) -> None:
        silent = f"worker {rank} has not answered for {SILENCE:.0f} seconds"
        self.lose(lambda: silent if isinstance(error, TimeoutError) else self._leader.why(rank))

    def _listen(self, rank: int, wire: Wire) -> None:
        """Be the thread that takes the answers of a worker."""
        try:
            while "lost" not in (message := wire.receive()).says:
                self._take(rank, message)
            self.lose(lambda: self._leader.ended(rank) or str(message.says["lost"]))
        except OSError as error:
            self._lose_rank(rank, error)

    def _take(self, rank: int, message: Message) -> None:
        key = rank, message.says["number"]
        if "progress" in message.says:
            if answer := self._answers.get(key):
                answer.progress(message.says["progress"])
        elif answer := self._answers.pop(key, None):
            if "error" in message.says:
                kind = getattr(errors, message.says["kind"], EngineError)
                answer.set_exception(kind(message.says["error"]))
            else:
                answer.set_result(message)
