"""The only code that opens a pickled checkpoint: python -m heedful.weights.unpickle SOURCE TARGET.

torch.load with weights_only reads tensors and refuses everything else that a pickle can name. It is a program of its
own, which `heedful.weights.convert` starts, bounds in time and ends: should a file exploit torch's reader, or unpack to
more than it is, the caller's process and memory are not affected.
"""

from __future__ import annotations

import pickle
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from heedful.weights.save import own_memory, write_safetensors

NESTED = ("state_dict", "model_state_dict", "model", "module")  # where training programs keep the weights
FREE = 2 * 2**30  # bytes of address space for torch's threads and allocator
COPIES = 4  # of the file: mapped, unpacked, cloned, serialized


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled checkpoint by name; ValueError for anything else in it."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it names {named[1]}" if named else str(error).splitlines()[0][:200]
        raise ValueError(f"{path} has more than tensors ({what}): it could run code and is not opened") from None
    except (RuntimeError, EOFError, OSError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint of torch: {str(error)[:200]}") from None
    for key in NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path} is no table of tensors by name")
    if other := [name for name, value in found.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{path} has {other[0]!r}, which is no tensor")
    tensors, seen = dict[str, Tensor](), set[int]()
    for name, tensor in found.items():
        tensors[name] = own_memory(tensor.detach())
        if tensors[name].data_ptr() in seen:  # tied to another
            tensors[name] = tensors[name].clone()
        seen.add(tensors[name].data_ptr())
    return tensors


def limit_resources(n_bytes: int) -> None:
    """Bound the address space and what may be written by the size of the file, where the system can."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    except (ImportError, OSError):  # not Linux
        return
    used = pages * resource.getpagesize()
    limits = {resource.RLIMIT_AS: used + COPIES * n_bytes + FREE, resource.RLIMIT_FSIZE: 2 * n_bytes + FREE}
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def unpickle_file(source: str, target: str) -> int:
    """Convert one file; a line on stderr and exit code 2 if it cannot be."""
    torch.set_num_threads(1)
    limit_resources(Path(source).stat().st_size)
    try:
        write_safetensors(read_tensors(Path(source)), Path(target))
    except MemoryError:
        print(f"{source} unpacks to much more than its size", file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:  # torch has no memory left: a RuntimeError
        print(f"{source} was not converted: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(unpickle_file(*sys.argv[1:]))
