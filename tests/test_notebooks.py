"""The notebooks run, and their stored outputs are complete, small and free of machine paths."""

import base64
import itertools
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LARGEST_PICTURE = 50_000  # bytes


def code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def kinds(cell):
    """The kinds of a cell's outputs. Printed text may arrive in one piece or in several."""
    found = [sorted(o.get("data", {o.output_type: ""})) for o in cell.outputs]
    return [kind for kind, _ in itertools.groupby(found)]


def test_there_are_two():
    assert len(NOTEBOOKS) == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    cells = code_cells(book)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    pictures = [output.data["image/png"] for output in outputs if "data" in output]
    assert len(pictures) >= 2
    assert max(len(base64.b64decode(picture)) for picture in pictures) < LARGEST_PICTURE
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert not re.search(r"(^|\s)(/|[A-Z]:\\)\w", text)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    for library in ("ipykernel", "matplotlib", "sklearn"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    book = nbformat.read(path, as_version=4)
    stored = [kinds(cell) for cell in code_cells(book)]
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, resources=place).execute()
    assert [kinds(cell) for cell in code_cells(book)] == stored
    text = "".join(o.text for cell in code_cells(book) for o in cell.outputs if "text" in o)
    (accuracy,) = re.findall(r"test accuracy: ([\d.]+) %", text)
    assert float(accuracy) > 50  # chance is 10
