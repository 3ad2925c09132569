"""The wheel as a user gets it: in an empty virtual environment, with pip alone."""

import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

PROBE = """
import sys, threading
import kvstrata
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"torch", "vllm", "numpy", "pydantic"}, loaded
assert threading.active_count() == 1
import os
assert len(os.listdir("/proc/self/task")) == 1, "importing started a native thread"
print(kvstrata.__file__)
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    repository = Path(__file__).resolve().parents[3]
    [found] = (repository / "target" / "wheels").glob("kvstrata-*.whl")
    return found


@pytest.fixture(scope="module")
def empty_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment into which the wheel, and nothing else, went."""
    directory = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    python = directory / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", wheel], check=True)
    return python


def metadata(wheel: Path, name: str) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [path] = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
        return Parser().parsestr(archive.read(path).decode())


def test_one_wheel_serves_every_cpython_from_3_11_on_manylinux(wheel: Path) -> None:
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("cp311", "abi3")
    assert platform.startswith("manylinux_2_")
    assert metadata(wheel, "METADATA")["Requires-Python"] == ">=3.11"


def test_the_wheel_requires_no_other_package(wheel: Path) -> None:
    required = metadata(wheel, "METADATA").get_all("Requires-Dist") or []
    assert [line for line in required if "extra ==" not in line] == []


def test_the_wheel_carries_module_stubs_marker_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for name in ("kvstrata/_native.abi3.so", "kvstrata/_native.pyi", "kvstrata/py.typed"):
        assert name in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "kvstrata/tests"))]


def test_the_wheel_does_not_name_the_folder_it_was_built_in(wheel: Path, repository: Path) -> None:
    folder = str(repository).encode()
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if folder in archive.read(name)] == []


def test_the_wheel_registers_the_plugin_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [path] = [n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")]
        text = archive.read(path).decode()
    assert "[vllm.general_plugins]" in text
    assert "kvstrata=kvstrata.vllm.plugin:register" in text.replace(" ", "")
    assert "kvstrata=kvstrata.cli.main:main" in text.replace(" ", "")


@pytest.mark.parametrize("where", ["empty", "full"])
def test_importing_kvstrata_imports_neither_torch_nor_vllm_and_starts_no_thread(
    where: str, empty_python: Path, tmp_path: Path
) -> None:
    python = empty_python if where == "empty" else Path(sys.executable)
    done = subprocess.run(
        [python, "-I", "-c", PROBE], check=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert "site-packages" in done.stdout


@pytest.mark.timeout(300)
def test_the_api_script_passes_where_only_the_wheel_is_installed(
    empty_python: Path, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("api_script.py")
    subprocess.run([empty_python, "-I", script, tmp_path / "work"], check=True, cwd=tmp_path)
