"""``scripts/argument_tables.py`` on a small file of our own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts import argument_tables

SCRIPT = Path(__file__).parents[2] / "scripts" / "argument_tables.py"

PARSER = """
import argparse
KINDS = []
def add(parser):
    group = parser.add_argument_group(title="a")
    group.add_argument("--depth", "--layers", type=int, default=2 ** 5, help="never in the table")
    group.add_argument("--shape", choices=["round", "square"], default="round")
    group.add_argument("--loud", action="store_true")
    group.add_argument("--no-echo", action="store_false", dest="echo")
    group.add_argument("--colour", action=argparse.BooleanOptionalAction, default=False)
    group.add_argument("--ranks", nargs="+", default=[1, 2])
    group.add_argument("--place", default=os.getenv("PLACE"))
    group.add_argument("word")
    exclude = ["hook"]
    ArgumentGroupFactory(Settings, exclude=exclude).build_group(parser)
"""
FIELDS = '''
@dataclass
class Base:
    rate: Optional[float] = None
    """Text."""
    parts: list[int] = field(default_factory=list)

@dataclass
class Settings(Base):
    hook: Callable = None
    fast: bool = True
    slow: bool = False
    maybe: Optional[bool] = False
    mode: Optional[Literal["a", "b"]] = "a"
    size: int = field(default=0, metadata={"argparse_meta": {"default": None, "arg_names": ["--own-size"]}})
    made: int = field(init=False, default=3)
    backend: Backend = Backend.auto
'''  # fmt: skip


def test_calls_and_fields_are_found() -> None:
    found = {item.name: tuple(item[1:]) for item in argument_tables.arguments([PARSER, FIELDS])}
    assert found == {
        "depth": ("32", "", "value"),
        "layers": ("32", "", "value"),
        "shape": ("round", "round,square", "value"),
        "loud": ("off", "", "on"),
        "no-echo": ("on", "", "off"),
        "colour": ("off", "", "both"),
        "ranks": ("1,2", "", "value"),
        "place": ("?", "", "value"),
        "rate": ("", "", "value"),
        "parts": ("[]", "", "value"),
        "no-fast": ("on", "", "off"),
        "disable-fast": ("on", "", "off"),
        "slow": ("off", "", "on"),
        "maybe": ("off", "", "on"),
        "mode": ("a", "a,b", "value"),
        "own-size": ("", "", "value"),
        "backend": ("auto", "", "value"),
    }


def test_a_class_nobody_turns_into_arguments_is_asked_for() -> None:
    assert argument_tables.arguments([FIELDS]) == []
    assert {"rate", "slow", "hook"} <= {item.name for item in argument_tables.arguments([FIELDS], ["Settings"])}


def test_the_table_says_where_it_is_from(tmp_path: Path) -> None:
    (tmp_path / "parser.py").write_text(PARSER, encoding="utf-8")
    line = [sys.executable, str(SCRIPT), str(tmp_path / "parser.py"), "--repository", "a/b"]
    said = subprocess.run(
        [*line, "--commit", "1234", "--date", "2026-01-02"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[0].startswith("# a/b, 1234, 2026-01-02, extracted by scripts/argument_tables.py from parser.py")
    assert "loud\toff\t\ton" in said
    assert "never in the table" not in "".join(said)
