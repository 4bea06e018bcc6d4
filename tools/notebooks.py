"""Execute the tutorials, from a fresh kernel each, as `make test-slow` does.

    python tools/notebooks.py [NAME ...]          execute, and say how long each took
    python tools/notebooks.py --write [NAME ...]  the same, and keep the outputs in the notebooks

Outputs are kept small: what is printed, and PNG pictures without their textual stand-ins.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).resolve().parent.parent / "docs" / "tutorials"


def execute(path: Path, timeout: float = 240) -> Any:
    """The notebook (a `nbformat.NotebookNode`) with the outputs of a fresh kernel in the notebook's folder.

    Raises:
        nbclient.exceptions.CellExecutionError: with the traceback, where a cell raises.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        notebook, timeout=timeout, record_timing=False, coalesce_streams=True, resources=resources
    ).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_essential, cell.outputs) if output is not None]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def _essential(output: Any) -> Any:
    """The output without what a reader does not see; None where nothing is left."""
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    output.metadata.clear()
    if "image/png" in output.data:
        output.data = {"image/png": output.data["image/png"]}
    elif set(output.data) != {"text/plain"}:
        raise ValueError(f"an output is {', '.join(output.data)}, expected text or a PNG picture.")
    return output


def main() -> int:
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="tutorials (default: all)")
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    arguments = parser.parse_args()
    paths = [TUTORIALS / f"{Path(name).stem}.ipynb" for name in arguments.names]
    for path in paths or sorted(TUTORIALS.glob("*.ipynb")):
        start = time.perf_counter()
        notebook = execute(path)
        if arguments.write:
            nbformat.write(notebook, path)
        print(f"{path.stem}: {time.perf_counter() - start:.1f} s, {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
