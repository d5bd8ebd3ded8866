#!/usr/bin/env python3
"""Build stubs for the libraries of Ascend's driver (CANN), so that the real torch_npu can be imported without it.

The wheel of torch_npu contains the schemas and shape functions of its operators, and links against the driver. The
stubs define every driver symbol that the wheel links or looks up by name; a call does nothing and reports success.
Nothing is computed: the stubs are for traces under torch's FakeTensorMode, where operators only see shapes, dtypes and
the device.

    python scripts/make_cann_stubs.py FOLDER      # needs cc and nm, and torch and torch_npu installed
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 LD_LIBRARY_PATH=FOLDER python -c "import torch, torch_npu"
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

LIBRARIES = (
    *("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi", "msprofiler", "runtime"),
)
# Functions that must return something: a count, a name, a size, an object that is not null.
ANSWERS = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { *device = 0; return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B2"; }',
    "aclrtGetMemInfo": "int aclrtGetMemInfo(int kind, size_t *free_, size_t *total)"
    " { *free_ = *total = (size_t)64 << 30; return 0; }",
    "aclGetCompileoptSize": "size_t aclGetCompileoptSize(int option) { return 64; }",
    "aclGetCompileopt": "int aclGetCompileopt(int option, char *text, size_t size) { if (size) *text = 0; return 0; }",
}
ALLOCATE = ("aclrtMalloc", "aclrtMallocAlign32", "aclrtMallocHost")
OBJECTS = (
    *("aclrtCreateStream", "aclrtCreateStreamWithConfig", "aclrtCreateStreamV2", "aclrtCtxGetCurrentDefaultStream"),
    *("aclrtCreateEvent", "aclrtCreateEventWithFlag", "aclrtCreateEventExWithFlag"),
    *("aclrtGetCurrentContext", "aclrtCreateContext"),
)
# Names of driver functions in a library that looks them up at run time.
BY_NAME = re.compile(rb"(?<![A-Za-z0-9_])(?:acl|[Hh]ccl|Msprof)[A-Za-z0-9_]{3,}(?=\0)")
NOT_THE_DRIVERS = ("Py", "_Py", "_ITM", "__gmon", "_ZTH")


def symbols(libraries: Iterable[Path], which: str) -> set[str]:
    """Return the dynamic symbols of libraries from ``nm``; symbols with a version belong to the system."""
    found = subprocess.run(["nm", "-D", which, *map(str, libraries)], capture_output=True, text=True, check=False)
    return {line.split()[-1] for line in found.stdout.splitlines() if len(line.split()) > 1}


def folder_of(package: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"make_cann_stubs: {package} is not installed")
    return Path(spec.origin).parent


def missing() -> set[str]:
    """Return the functions that torch_npu calls and that neither torch_npu nor torch defines."""
    npu = folder_of("torch_npu")
    own = [*npu.glob("*.so"), *npu.glob("lib/*.so")]
    known = {name.split("@")[0] for name in symbols([*own, *folder_of("torch").glob("lib/*.so*")], "--defined-only")}
    linked = {name for name in symbols(own, "--undefined-only") if "@" not in name} - known
    named = {match.decode() for library in own for match in BY_NAME.findall(library.read_bytes())}
    return {name for name in linked if not name.startswith(NOT_THE_DRIVERS)} | named


def source(names: Iterable[str]) -> str:
    """Return C code that defines all names."""
    answers = {
        **ANSWERS,
        **{name: f"int {name}(void **p, size_t n) {{ *p = malloc(n ? n : 1); return 0; }}" for name in ALLOCATE},
        **{name: f"static int of_{name}; int {name}(void **p) {{ *p = &of_{name}; return 0; }}" for name in OBJECTS},
    }
    plain = sorted(set(names) - answers.keys())
    # Names of C++ functions are not C identifiers, so each becomes an assembler label in front of "return 0".
    labels = "".join(f'".globl {name}\\n.type {name},%function\\n{name}:\\n"\n' for name in plain)
    header = "#include <stdlib.h>\n" + "\n".join(answers.values())
    return f'{header}\n__asm__(".text\\n"\n{labels}"{_return_zero()}\\n");\n'


def _return_zero() -> str:
    import platform

    return {"x86_64": "xorl %eax, %eax\\n ret", "aarch64": "mov w0, #0\\n ret"}[platform.machine()]


def main(folder: Path) -> None:
    """Build one library under all names of the driver's libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stubs.c").write_text(source(missing()))
    for name in LIBRARIES:
        flags = ["-w", "-shared", "-fPIC", f"-Wl,-soname,lib{name}.so", "-o", str(folder / f"lib{name}.so")]
        subprocess.run(["cc", *flags, str(folder / "stubs.c")], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
