"""The notebook of the documentation runs in a kernel, and is stored without output."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import ROOT

pytestmark = pytest.mark.nightly

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_notebook_is_stored_without_output() -> None:
    document = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert set(document["metadata"]) == {"kernelspec", "language_info"}
    assert document["metadata"]["language_info"] == {"name": "python"}


def test_notebook_runs_in_a_kernel_with_a_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    os.makedirs(tmp_path / "work")
    resources = {"metadata": {"path": str(tmp_path / "work")}}
    # An error of a cell is an error here.
    nbclient.NotebookClient(notebook, timeout=280, resources=resources).execute()
    outputs: list[Any] = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    text = "".join(output.get("text", "") for output in outputs)
    assert "step 300/300  eval" in text
    assert "Did you mean --train_steps?" in text
    bars = [output.data for output in outputs if "<progress" in str(output.get("data"))]
    assert [bar["text/plain"].split()[1] for bar in bars] == ["300/300", "200/200"]
    assert (tmp_path / "work" / "runs" / "latest" / "result.json").exists()
