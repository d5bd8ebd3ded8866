"""``megapar configs``: lists the configurations of the package, prints one, or makes one of a published config.json."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

from megapar.config.config import FLAGS
from megapar.config.published import Unsupported, architecture_of, flags_of, read_config, remarks
from megapar.config.values import shown
from megapar.config.yaml_file import FOLDER, SUFFIX, near_preset, preset_names
from megapar.model.rope_scaling import NONE
from megapar.schema.flag import SCRIPTS
from megapar.schema.published import Json
from megapar.tools.parser import Parser

KIND_OF_SCRIPT = {script: kind for kind, script in SCRIPTS.items()}


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(
        prog="megapar configs",
        description="List the configurations of the package with the model that each is for (megapar pretrain MODEL "
        "--config NAME), or print one of them.",
        examples=("tiny > my.yaml", "--from-hf downloaded/config.json > my.yaml"),
    )
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("name", nargs="?", metavar="NAME", help="print this configuration")
    printed.add_argument(
        "--from-hf",
        metavar="PATH",
        help="print the configuration that trains a published model from random weights: PATH is its folder or "
        "config.json, and each line names the key that it comes from",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """List the configurations, or print one. Return 0, or 2 if there is none."""
    args = make_parser().parse_args(argv)
    if args.from_hf is not None:
        return _print_published(args.from_hf)
    if (name := args.name) is None:
        print(listing())
        return 0
    path = FOLDER / f"{name.removesuffix(SUFFIX)}{SUFFIX}"
    if name.removesuffix(SUFFIX) not in preset_names():
        hint = f"Did you mean {near}?" if (near := near_preset(name)) else "megapar configs lists them."
        print(f"megapar configs: the package has no configuration {name}. {hint}", file=sys.stderr)
        return 2
    sys.stdout.write(path.read_text(encoding="utf-8"))
    return 0


def _print_published(path: str) -> int:
    try:
        sys.stdout.write(published_yaml(read_config(path), path))
    except Unsupported as error:
        print(f"megapar configs: --from-hf {path}: {error}.", file=sys.stderr)
        return 2
    return 0


def published_yaml(config: Json, source: str) -> str:
    """Return the YAML file of a config.json's model: its sizes, and other flags that are not at their defaults.

    Sizes are the whole numbers of the config.json. Each line names its key.
    Raises Unsupported for a model that megapar does not train.
    """
    architecture = architecture_of(config)
    kind, flags = flags_of(config)
    if not flags.get("mtp_depth"):
        flags.pop("mtp_block", None)  # of a class with such a block, in a model without one
    if flags.get("rope_scaling_type") == NONE:
        flags.pop("original_max_position_embeddings", None)  # of no scaling
    keys = {setting.flag: setting.name for setting in architecture.settings if setting.flag}
    if isinstance(spread := config.get("initializer_range"), float):  # a trained model's weights need none
        flags["init_std"], keys["init_std"] = spread, "initializer_range"
    lines = [
        (f"{name}: {_yaml(flags[name])}", keys.get(name, architecture.name))
        for name, flag in FLAGS.items()
        if flags.get(name) is not None
        and (flags[name] != flag.defaults[kind] or type(config.get(keys.get(name, ""))) is int)
    ]
    width = max(len(text) for text, _ in lines)
    notes = [f"# Not in it: {remark}." for remark in remarks(config)]
    if (weight := config.get("router_aux_loss_coef")) is not None:
        notes.append(f"# Not in it: router_aux_loss_coef is {shown(weight)}, of another formula (docs/models.md).")
    header = [
        f"# {architecture.name} from random weights, with the sizes of {source}; any of them may be changed.",
        f"# Add data, batch, rate, steps and layout, as in: megapar pretrain {kind} --config FILE --data-path PATH ...",
        *notes,
        f"script: {SCRIPTS[kind]}",
    ]
    return "\n".join([*header, *(f"{text:{width}}  # {key}" for text, key in lines)]) + "\n"


def yaml_of(settings: Mapping[str, Any]) -> str:
    """Return lines of a configuration file; settings that are None are left out."""
    return "".join(f"{name}: {_yaml(value)}\n" for name, value in settings.items() if value is not None)


def _yaml(value: Any) -> str:
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z][\w-]*", value)
        and value.lower() not in ("on", "off", "true", "false", "yes", "no", "null")
    ):
        return value
    if isinstance(value, float) and "." not in (text := repr(value)):
        return text.replace("e", ".0e")  # YAML 1.1 reads 1e-06 as text
    words = value if isinstance(value, tuple) else (value,)
    # YAML would read JSON's two escapes of a character beyond 16 bits as two characters.
    plain = all(str(word).isprintable() for word in words)
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=not plain)


def listing() -> str:
    """Return a line for each configuration: its name, its model, and the first sentence of its header."""
    names = preset_names()
    width = max(map(len, names), default=0)
    texts = {name: (FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8") for name in names}
    return "\n".join(f"{name:{width}}  {_model(text):5}  {header_title(text)}" for name, text in texts.items())


def _model(text: str) -> str:
    found = re.search(r"^script: (\S+)$", text, re.MULTILINE)
    return KIND_OF_SCRIPT.get(found[1], "") if found else ""


def header_title(text: str) -> str:
    """Return the first sentence of a file's header, up to a semicolon; a remark in parentheses with one is left out."""
    paragraph = " ".join(line[2:] for line in text.partition("\n#\n")[0].splitlines() if line.startswith("# "))
    outside = re.sub(r" \([^)]*;[^)]*\)", "", paragraph)
    return re.split(r"\.(?=\s+[A-Z]|\s+source:|$)|;", outside)[0]
