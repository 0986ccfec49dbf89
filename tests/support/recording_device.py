"""A CPU device that captures graphs: a replay reruns the captured calls on the same tensors."""

from __future__ import annotations

from collections.abc import Callable

from penstock.device.cpu import CpuDevice


class RecordingDevice(CpuDevice):
    """num_captures, num_replays: counts. num_cuts: calls between the pieces of the last capture. refuses:
    error text of every capture.
    """

    captures_graphs = True

    def __init__(self, refuses: str | None = None) -> None:
        super().__init__(1)
        self.num_captures = 0
        self.num_replays = 0
        self.num_cuts = 0
        self._refuses = refuses

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._refuses is not None:
            raise RuntimeError(self._refuses)
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            work()

        return replay

    def capture_pieces(self, work: Callable[[Callable[[Callable[[], object]], None]], None]) -> Callable[[], None]:
        """Calls between pieces do not run during the capture."""
        self.num_cuts = 0

        def cut(call: Callable[[], object]) -> None:
            self.num_cuts += 1

        replay = self.capture(lambda: work(lambda call: call()))
        work(cut)
        return replay
