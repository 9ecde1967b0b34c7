"""The pages are whole: links lead somewhere, commands and their options exist, YAML is YAML, and every variable is in the table."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from loadbox.cli._app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_PAGES = [*PAGES, ROOT / "proof" / "README.md"]  # as test_blocks.py has them
PAGES = [*RUN_PAGES, ROOT / "benchmarks" / "routing" / "README.md"]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
RUN_ELSEWHERE = ("python", "c")  # test_blocks.py, test_abi.py
FOREIGN = ("vllm", "kill", "pip", "docker", "podman", "helm", "kubectl", "cc", "curl", "systemctl")


def blocks(kind: str) -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{page.read_text().count(chr(10), 0, found.start()) + 2}", found[2])
        for page in PAGES
        for found in BLOCK.finditer(page.read_text())
        if found[1] == kind
    ]


def anchors(page: Path) -> set[str]:
    """As hosts of Markdown make them of headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target} is none of {sorted(anchors(there))}"


def test_every_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    kinds = {found[1] for page in PAGES for found in BLOCK.finditer(page.read_text())}
    assert kinds <= {*RUN_ELSEWHERE, "sh", "yaml", "console"}  # a kind that nothing looks at stays out


def test_every_block_that_runs_elsewhere_is_on_a_page_that_does() -> None:
    for page in PAGES:
        kinds = {found[1] for found in BLOCK.finditer(page.read_text())}
        assert "python" not in kinds or page in RUN_PAGES, f"{page}: test_blocks.py does not run this page"
        assert "c" not in kinds or page.name == "abi.md", f"{page}: test_abi.py does not compile this page"


@pytest.mark.parametrize(("where", "code"), blocks("sh"), ids=[where for where, _ in blocks("sh")])
def test_commands_exist(where: str, code: str) -> None:
    """Parsed, not run: that an option exists and takes that value."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if not words or words[0] in FOREIGN:
            continue
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, line
        elif words[0] == "loadbox":
            if "|" in words:
                words = words[: words.index("|")]
            parse(words[1:])
        else:
            pytest.fail(f"{where}: what is {line!r}?")


def parse(words: list[str]) -> None:
    if words and words[0].startswith("-"):
        return
    context = click.Context(app)
    name, command, rest = app.resolve_command(context, words)
    assert command is not None
    command.make_context(name, list(rest), parent=context, resilient_parsing="-h" in rest or "--help" in rest)


@pytest.mark.parametrize(("where", "code"), blocks("yaml"), ids=[where for where, _ in blocks("yaml")])
def test_yaml(where: str, code: str) -> None:
    for pod in yaml.safe_load_all(code):
        if pod.get("kind") != "Pod":
            continue
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        for container in pod["spec"]["containers"]:
            for mount in container.get("volumeMounts", []):
                assert mount["mountPath"] == "/dev/shm"
                assert volumes[mount["name"]]["emptyDir"]["medium"] == "Memory"
            for variable in container.get("env", []):
                assert isinstance(variable["value"], str)
        assert volumes or pod["spec"]["hostIPC"] is True


def test_there_are_pods() -> None:
    assert sum("kind: Pod" in code for _, code in blocks("yaml")) == 2


def test_the_table_of_variables_is_whole() -> None:
    readme = (ROOT / "README.md").read_text()
    table = set(re.findall(r"LOADBOX_[A-Z_]+", "\n".join(line for line in readme.splitlines() if line.startswith("| `LOADBOX"))))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() if listed.returncode == 0 else [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")]
    used: set[str] = set()
    for name in names:
        path = ROOT / name  # not of pages: a name there proves no use
        if path.suffix in (".py", ".c", ".h", "") and path.is_file() and not path.is_symlink():
            found = re.findall(r"\bLOADBOX_[A-Z_]+\b", path.read_text(errors="ignore"))
            used |= {variable for variable in found if not variable.endswith("_H")}
    assert used == table
    pages = {name for page in PAGES for name in re.findall(r"\bLOADBOX_[A-Z_]+\b", page.read_text())}
    assert {name for name in pages if name != "LOADBOX_H"} <= table
