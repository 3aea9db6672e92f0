"""The `rbn` command."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line. Entry point of the `rbn` script."""
    try:
        _main()
    except KeyboardInterrupt:  # before a command could handle it
        print("rbn: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        # Nothing is left to interrupt. During shutdown, Python restores the default handlers, and a
        # signal would kill a command that has done its work.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _main() -> None:
    if sys.argv[1:] == ["--version"]:  # fast, and works without typer
        import rbn

        print(f"rbn {rbn.__version__}")
        return
    try:
        import typer  # noqa: F401
    except ImportError:
        extra = "demo" if sys.argv[1:2] == ["demo"] else "train,plots"
        print(f"rbn needs typer: pip install 'recurrent-batchnorm[{extra}]'", file=sys.stderr)
        sys.exit(2)
    from rbn.training.interrupt import handle_signals

    handle_signals()
    from rbn.cli import common
    from rbn.cli.app import app

    try:
        app()
    except SystemExit as left:
        if left.code == 130 and not common.stopped:  # Typer exits without a message
            raise KeyboardInterrupt from left
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # started by torchrun
            from rbn.training.launcher import exit_at_once

            exit_at_once(left.code if isinstance(left.code, int) else int(left.code is not None))
        raise
    finally:
        # If exec() is interrupted, e.g. while an import creates a dataclass, `python -m` exits with
        # the signal even though it was handled. Another exec() clears that state.
        exec("")
