"""Data sets, as tensors of sequences."""

from rbn.data.digits import digits
from rbn.data.errors import DataAltered, DataNotFound
from rbn.data.files import data_folder, get
from rbn.data.minibatches import Minibatches
from rbn.data.mnist import mnist, pmnist
from rbn.data.ptb import ptb
from rbn.data.pydoc import pydoc
from rbn.data.split import Split, Splits
from rbn.data.text import Text
from rbn.data.text8 import text8
from rbn.data.windows import Windows

__all__ = [
    "DataAltered",
    "DataNotFound",
    "Minibatches",
    "Split",
    "Splits",
    "Text",
    "Windows",
    "data_folder",
    "digits",
    "get",
    "mnist",
    "pmnist",
    "ptb",
    "pydoc",
    "text8",
]
