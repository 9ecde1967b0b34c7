"""What users install: the sdist and the wheel, built, checked, and tested in a clean environment away from the tree."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so")
# What needs nothing of the tree but the tests themselves.
SUITES = [
    "mailbox/test_publish.py", "mailbox/test_states.py", "mailbox/test_group.py", "mailbox/test_names.py",
    "mailbox/test_mapping.py", "mailbox/test_fork.py", "mailbox/test_odd_files.py", "mailbox/test_racing.py",
    "reader", "piggyback", "cli/test_commands.py",
]  # fmt: skip

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    told = {key: value for key, value in os.environ.items() if not key.startswith(("LOADBOX", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env={**told, **env}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def environment(path: Path) -> Path:
    run(sys.executable, "-m", "venv", path, cwd=path.parent)
    return path / "bin" / "python"


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where all of this is done; what was built and found good stays behind in ``$LOADBOX_KEEP_WHEEL``."""
    folder = tmp_path_factory.mktemp("away")
    yield folder
    keep = os.environ.get("LOADBOX_KEEP_WHEEL")
    if keep and not request.session.testsfailed:
        shutil.copytree(folder / "dist", keep, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def sdist(away: Path) -> Path:
    tree = away / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", away / "dist", cwd=tree)
    (found,) = (away / "dist").glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(away: Path, sdist: Path) -> Path:
    """Built from the sdist, in an environment with the build requirements and, where we may take it away, without a network."""
    python = environment(away / "builder")
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    run(python, "-m", "pip", "install", "--quiet", *requires, cwd=away)
    alone = ["unshare", "--net"] if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0 else []
    run(
        *alone, python, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", away / "dist",
        sdist, cwd=away, LOADBOX_REQUIRE_C="1",
    )  # fmt: skip
    (found,) = (away / "dist").glob("*.whl")
    return found


def test_the_sdist_is_whole(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git here to say which files belong to the project")
    missing = {name for name in listed.stdout.split() if not name.startswith(".")} - names
    assert not missing


def test_the_wheel_is_whole(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    rooms = ("mailbox", "piggyback", "reader", "engines", "cli")
    for room in rooms:
        assert f"loadbox/{room}/py.typed" in names
        sources = {path.relative_to(ROOT / room) for path in (ROOT / room).rglob("*.py")}
        assert {f"loadbox/{room}/{path}" for path in sources} <= names
    assert "loadbox/__init__.py" not in names  # a namespace, for other distributions to join
    for wanted in ("loadbox/mailbox/loadbox.h", "loadbox/mailbox/_seqlock_c.pyi", "loadbox/reader/_core_c.pyi"):
        assert wanted in names
    compiled = {name.split(".")[0] for name in names if name.endswith(".so")}
    assert compiled == {"loadbox/mailbox/_seqlock_c", "loadbox/reader/_core_c"}
    assert all(name.startswith(("loadbox/", f"loadbox-{PROJECT['version']}.dist-info/")) for name in names)


def test_what_it_says_of_itself(wheel: Path, sdist: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=wheel.parent)
    with zipfile.ZipFile(wheel) as archive:
        (place,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(place))
        assert {"LICENSE", "cli/demo/traces/SOURCE.md"} <= set(said.get_all("License-File", []))
    assert said["Version"] == PROJECT["version"]
    needed = {re.split(r"[ >=<~!\[;]", need)[0] for need in said.get_all("Requires-Dist", []) if "extra ==" not in need}
    assert needed == {"numpy", "posix_ipc"}


def test_the_version_stands_in_one_place() -> None:
    for path in [
        *ROOT.glob("*.py"),
        *(path for room in ("mailbox", "piggyback", "reader", "engines", "cli") for path in (ROOT / room).rglob("*.py")),
    ]:
        assert f'"{PROJECT["version"]}"' not in path.read_text(), path


def test_the_core_alone(away: Path, wheel: Path) -> None:
    """Without extras: the mailbox and the view work, and the rest says what to install."""
    python = environment(away / "core")
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=away)
    said = run(
        python, "-W", "error", "-c",
        "import os\n"
        "from loadbox.mailbox import MailboxReader, MailboxWriter, _seqlock\n"
        "from loadbox.reader import LoadReader\n"
        "group = f't-wheel-{os.getpid()}'\n"
        "with MailboxWriter(group, 0, 1) as writer, MailboxReader(group, 0) as reader, LoadReader(group) as view:\n"
        "    writer.publish(1, 2, 3, 4)\n"
        "    print(_seqlock.BACKEND, tuple(reader.read()), view.choose('a'))\n",
        cwd=away,
    )  # fmt: skip
    assert said == "c (1, 2, 3, 4) 0\n"
    refused = subprocess.run([python.parent / "loadbox", "--help"], cwd=away, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "pip install 'loadbox[cli]'" in refused.stderr
    told = subprocess.run([python, "-c", "import loadbox.piggyback"], cwd=away, capture_output=True, text=True, timeout=60)
    assert "pip install 'loadbox[piggyback]'" in told.stderr


def test_the_suite_on_the_wheel(away: Path, wheel: Path) -> None:
    python = environment(away / "user")
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[test]", cwd=away)
    there = away / "suite"
    shutil.copytree(ROOT / "tests", there / "tests", ignore=LEFT_OUT)
    shutil.copy(ROOT / "pyproject.toml", there)
    where = run(python, "-c", "import loadbox.mailbox as m; print(m.__file__)", cwd=there)
    assert where.startswith(str(away / "user"))
    suites = [there / "tests" / suite for suite in SUITES]
    assert " passed" in run(python.parent / "pytest", "-q", "-n", "2", "-m", "not slow", *suites, cwd=there)
    run(python.parent / "loadbox", "demo", "--plain", "--seconds", "1", "--ranks", "2", cwd=there)
