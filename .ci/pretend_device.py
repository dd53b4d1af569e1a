"""Runs a script on a pretend accelerator, so that a CPU shows what only a GPU would, and counts the stalls.

    python .ci/pretend_device.py train_score.py --data shapes --preset tiny --steps 3 --device pretend
    python .ci/pretend_device.py --waits sample.py ...       # also where the host waited, and how often

Tensors of "pretend" (torch's PrivateUse1) lie in the CPU's memory but are no CPU tensors: mixing both, a CPU
generator for a device tensor, or .numpy() without .cpu() fail as on CUDA. The last line on stderr counts the
launched operations and the waits of the host: for a number (item, bool), a size (nonzero, a mask as index), a
copy in either direction without non_blocking; copies with it are counted apart. PRETEND_NO_FLOAT64=1 refuses
float64, as MPS does. Not shown: NCCL, bfloat16, torch.compile, generators of the device, branches on "cuda".
"""
import collections
import functools
import os
import pathlib
import re
import runpy
import sys
import traceback
import warnings

import torch
from torch.utils import backend_registration

LAUNCHES, WAITS, ASYNCHRONOUS = (collections.Counter() for _ in range(3))  # WAITS by what and file:line
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # CUDA, too, takes indices from the CPU
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
         "unique_consecutive", "repeat_interleave", "_linalg_check_errors"}  # the first: item, bool, float
NO_FLOAT64 = os.environ.get("PRETEND_NO_FLOAT64") == "1"
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
LIBRARY = torch.library.Library("aten", "IMPL")
PROJECT = pathlib.Path(__file__).resolve().parent.parent


def wait(kind):
    """Counts a wait at the innermost line of the project's own files; a backward pass has none."""
    lines = ((pathlib.Path(f.f_code.co_filename), n) for f, n in traceback.walk_stack(sys._getframe()))
    where = next((f"{path.name}:{line}" for path, line in lines if path.parent == PROJECT), "elsewhere")
    WAITS[kind, where] += 1


def each(function, value):
    return type(value)(map(function, value)) if isinstance(value, (list, tuple)) else function(value)


def device_storage(memory):
    """A storage of the device over the memory of a CPU storage, which it keeps alive."""
    where = memory.data_ptr(), torch.device("pretend:0"), memory.nbytes()
    storage = torch._C._construct_storage_from_data_pointer(*where)
    storage.memory = memory
    return storage


def place(handle, raw, storages):
    """Lays a device tensor over the memory of the CPU tensor `raw`; a view shares the storage of its base."""
    if NO_FLOAT64 and raw.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"the pretend device has no {raw.dtype}; use float32")
    storage = storages.get(raw.untyped_storage().data_ptr()) or device_storage(raw.untyped_storage())
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    return set_.redispatch(CPU, handle, storage, raw.storage_offset(), raw.shape, raw.stride())


def kernel(op):
    """The device's version of an operator: looks where the inputs are, counts, and lets the CPU compute."""
    name = op._schema.name.removeprefix("aten::")
    if name == "set_":  # the CPU's kernel only notes where a tensor lies
        return functools.partial(op.redispatch, CPU)
    views = any(value.alias_info and not value.alias_info.is_write for value in op._schema.returns)
    launches = not views and not name.startswith(("empty", "new_empty"))

    def call(*args, **kwargs):
        inputs, storages = {}, {}  # what was given, by its CPU tensor's id; storages by address
        indices = [v for v in args[1] if v is not None] if name in INDEXING else []

        def to_cpu(value):
            if not isinstance(value, torch.Tensor):
                return torch.device("cpu") if isinstance(value, torch.device) else value
            raw = value
            if value.is_pretend:
                storage = storages[value.untyped_storage().data_ptr()] = value.untyped_storage()
                layout = value.storage_offset(), value.shape, value.stride()
                raw = torch.empty(0, dtype=value.dtype).set_(storage.memory, *layout)
            elif value.ndim and name not in COPIES and not any(value is index for index in indices):
                raise RuntimeError(f"{op}: one tensor {tuple(value.shape)} is on the CPU, others are not")
            inputs[id(raw)] = value
            return raw

        def to_device(raw):
            if not isinstance(raw, torch.Tensor) or name == "_to_copy" and target.type == "cpu":
                return raw
            if id(raw) not in inputs:
                return place(torch._C._acc.create_empty_tensor((0,), raw.dtype), raw, storages)
            handle = inputs[id(raw)]
            moved = (handle.data_ptr(), handle.shape) != (raw.data_ptr(), raw.shape)
            return place(handle, raw, storages) if moved else handle

        if (generator := kwargs.get("generator")) is not None and generator.device.type != "pretend":
            raise RuntimeError(f"{op}: a generator of the CPU for a tensor of the pretend device")
        raw_args = [each(to_cpu, value) for value in args]
        raw_kwargs = {key: each(to_cpu, value) for key, value in kwargs.items()}
        given = list(inputs.values())
        target = kwargs.get("device") or (given[0].device if given else None)
        if name in COPIES and any(tensor.device.type != target.type for tensor in given):
            if kwargs.get("non_blocking") or args[2:] == (True,):
                ASYNCHRONOUS[f"copy to {target.type}"] += 1
            else:
                wait(f"copy to {target.type}")
        elif name in READS or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            wait(name)
        pairs = ((a, b) for a in given for b in given if NO_FLOAT64 and a.ndim == 0 and name not in COPIES)
        if any(torch.result_type(a, b) == torch.float64 for a, b in pairs if a is not b):
            raise TypeError(f"{op}: promotes to float64, which the pretend device does not have")
        LAUNCHES[name] += launches
        return each(to_device, op(*raw_args, **raw_kwargs))

    return call


def activate():
    """Makes the device known to torch; once per process."""
    backend_registration._setup_privateuseone_for_python_backend("pretend")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
    for name in torch._C._dispatch_get_all_op_names():
        space, base, overload = (*re.split("::|[.]", name), "default")[:3]
        simple = has(name, "CPU") or has(name, "CompositeExplicitAutograd")
        composed = has(name, "CompositeImplicitAutograd") or base == "detach"  # torch's own serve
        if space == "aten" and simple and not composed:
            LIBRARY.impl(name, kernel(getattr(getattr(torch.ops.aten, base), overload)), "PrivateUse1")
    kind = torch.UntypedStorage  # for deepcopy, torch.save and torch.load; their copies are not counted
    clone, cpu, to = kind.clone, kind.cpu, kind.to
    kind.clone = lambda self: device_storage(clone(self.memory)) if hasattr(self, "memory") else clone(self)
    kind.cpu = lambda self: clone(self.memory) if hasattr(self, "memory") else cpu(self)
    kind.to = lambda self, **to_what: (
        device_storage(clone(self)) if "pretend" in str(to_what) else to(self, **to_what))


if __name__ == "__main__":
    listed = "--waits" in sys.argv[1:2]
    sys.argv = sys.argv[2:] if listed else sys.argv[1:]
    sys.path[0] = str(PROJECT)
    activate()
    try:
        runpy.run_path(os.path.abspath(sys.argv[0]), run_name="__main__")
    finally:
        print(f"pretend device: {LAUNCHES.total()} operations, the host waited {WAITS.total()} times, "
              f"{ASYNCHRONOUS.total()} asynchronous copies", file=sys.stderr)
        for (what, where), count in WAITS.most_common() if listed else []:
            print(f"{count:8} {where} {what}", file=sys.stderr)
