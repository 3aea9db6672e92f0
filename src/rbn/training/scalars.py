"""Learning curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path


class Scalars:
    """Writes the figures of evaluations to a folder that TensorBoard reads.

    Args:
        folder: of the event files.
        step: from which the run goes on; what was written beyond it is hidden.
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
