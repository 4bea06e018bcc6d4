"""The distribution: one version, a long description fit for PyPI, a wheel that runs where it is installed."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import softdtw_cuda

tomllib = pytest.importorskip("tomllib")  # of Python 3.11

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*command: str | Path, cwd: Path) -> str:
    # PYTHONPATH would put the sources before what is installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_version_is_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT


def test_every_dependency_has_a_minimum_version() -> None:
    for line in PROJECT["dependencies"]:
        assert any(each.operator == ">=" for each in Requirement(line).specifier), line


def test_the_minimum_versions_are_those_that_ci_runs() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"\b([a-z][\w-]*)==([\d.]+\d)", workflow))
    for line in PROJECT["dependencies"]:
        requirement = Requirement(line)
        (least,) = (each.version for each in requirement.specifier if each.operator == ">=")
        assert requirement.name in pinned, f"{requirement.name} is not pinned in ci.yml"
        assert (pinned[requirement.name] + ".").startswith(least + "."), requirement.name


def test_python_versions_are_those_that_ci_runs() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    classified = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert [each.strip(' "') for each in matrix.split(",")] == classified


def long_description() -> str:
    pytest.importorskip("hatch_fancy_pypi_readme")
    return run(sys.executable, "-m", "hatch_fancy_pypi_readme", ROOT / "pyproject.toml", cwd=ROOT)


def test_the_long_description_has_nothing_of_a_checkout() -> None:
    readme, text = (ROOT / "README.md").read_text(encoding="utf-8"), long_description()
    assert "pip install softdtw-cuda-torch    # Python 3.10 or newer" in text
    for gone in ("in this folder", "make demo", "make test", "The same network on the same data", "!["):
        assert gone in readme
        assert gone not in text
    # All else stays, without links into the repository.
    kept = readme.split("```python", 1)[1].split("On a fresh machine")[0] + readme.split("## Speed", 1)[1]
    plain = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", kept)
    assert all(line in text for line in plain.splitlines())


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution; the wheel is built from the latter."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=ROOT)
    return folder


@pytest.mark.slow
def test_twine_accepts_it(distribution: Path) -> None:
    files = sorted(distribution.iterdir())
    version = softdtw_cuda.__version__
    names = [f"softdtw_cuda_torch-{version}-py3-none-any.whl", f"softdtw_cuda_torch-{version}.tar.gz"]
    assert [file.name for file in files] == names
    output = run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=distribution)
    assert output.count("PASSED") == 2


@pytest.mark.slow
def test_the_long_description_stands_alone(distribution: Path) -> None:
    (wheel,) = distribution.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(path))
    assert metadata["Version"] == softdtw_cuda.__version__
    text = metadata.get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links == re.findall(r"\]\((https?://[^)]*)\)", readme)
    assert re.findall(r"(?:src|href)=\"(?!https?:)", text) == []
    assert text.strip() == long_description().strip()
    assert "softdtw_cuda/py.typed" in names
    sources = {
        f"softdtw_cuda/{path.relative_to(ROOT / 'src/softdtw_cuda').as_posix()}"
        for path in (ROOT / "src/softdtw_cuda").rglob("*")
        if path.suffix in (".py", ".cu", ".cuh")
    }
    assert sources == {name for name in names if name.endswith((".py", ".cu", ".cuh"))}


@pytest.mark.slow
def test_an_editable_installation_has_what_tutorials_import(tmp_path: Path) -> None:
    program = f"from hatchling.build import build_editable; print(build_editable({str(tmp_path)!r}))"
    name = run(sys.executable, "-c", program, cwd=ROOT).splitlines()[-1]
    with zipfile.ZipFile(tmp_path / name) as archive:
        (paths,) = (archive.read(each).decode() for each in archive.namelist() if each.endswith(".pth"))
    assert {str(ROOT), str(ROOT / "src")} == set(paths.split())


@pytest.mark.slow
def test_the_installed_wheel_runs_the_first_example(distribution: Path, tmp_path: Path) -> None:
    (wheel,) = distribution.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = next((tmp_path / "env").glob("[bS]*/python*"))
    (site,) = (tmp_path / "env").rglob("site-packages")
    # The dependencies are those of this environment, after the new one's own packages.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--disable-pip-version-check",
    )
    run(*pip, "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    shown = "\nimport softdtw_cuda\nprint(softdtw_cuda.__file__, softdtw_cuda.__version__)\n"
    output = run(python, "-I", "-c", example + shown, cwd=tmp_path)
    file, version = output.split()[-2:]
    assert Path(file).is_relative_to(site)
    assert version == softdtw_cuda.__version__
