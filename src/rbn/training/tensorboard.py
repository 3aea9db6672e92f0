"""Learning curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path


class TensorBoardLog:
    """Writes the metrics of evaluations as TensorBoard event files.

    Args:
        folder: folder of the event files.
        step: the step at which the run resumes; TensorBoard hides what was written after it.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "learning curves need TensorBoard: pip install 'recurrent-batchnorm[train]'"
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, record: dict[str, float]) -> None:
        """Add one evaluation."""
        for name, value in record.items():
            if name not in ("step", "seconds"):
                self._writer.add_scalar(name, value, int(record["step"]))
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
