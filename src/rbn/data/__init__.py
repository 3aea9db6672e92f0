"""Where sequences come from."""

from rbn.data.digits import digits
from rbn.data.split import Split, Splits

__all__ = ["Split", "Splits", "digits"]
