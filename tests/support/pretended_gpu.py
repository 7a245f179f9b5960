"""A pretended GPU: tensors that report cuda:0 as their device, but have their numbers in host memory.

Every operation on them runs on the CPU, and fails if it mixes devices. `RECORD` counts the kernels that CUDA would
launch and the times that the host would wait for the device, by the file that caused them. Real trainers run on it,
with interpreted kernels. FakeTensorMode does not suffice: trainers read values, which its tensors do not have.

It changes torch for the whole process: `python` runs a process, which calls `start()` before it imports trl_ext. In the
block of a `DeviceMode`, "cuda" is the pretended device. Not covered: errors in the kernels themselves.
"""

import collections
import contextlib
import functools
import hashlib
import importlib
import itertools
import os
import subprocess
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_SOURCE = Path(__file__).with_suffix(".cpp")
CUDA = torch.device("cuda", 0)
HELD_ON = torch.device("cpu")  # "meta" for tensors without numbers
_PACKAGES = ("/trl_ext/", "/trl/", "/accelerate/", "/transformers/", "/peft/")


def python(*words: str) -> str:
    """Run Python in a process where `start()` works, and return the last line of its output."""
    env = os.environ | {"LD_PRELOAD": str(_library()), "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    if words[0] == "-c":
        words = ("-c", words[1] + "\nimport pretended_gpu\npretended_gpu.leave()")
    command = [sys.executable, *words]
    run = subprocess.run(command, env=env, cwd=_SOURCE.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-5000:]
    return run.stdout.splitlines()[-1]


def leave() -> None:
    """End the process at once: autograd's threads free pretended tensors while Python shuts down, and may abort."""
    sys.stdout.flush()
    os._exit(0)


def _library() -> Path:
    """Compile the C++ part with g++, once for each torch, and return its path."""
    torch_folder = Path(torch.__file__).parent
    key = hashlib.sha256(f"{_SOURCE.read_text()} {torch_folder} {torch.__version__}".encode()).hexdigest()
    path = _SOURCE.parent / "__pycache__" / f"pretended_gpu-{key[:16]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        libraries = torch_folder / "lib"
        options = ["-shared", "-fPIC", "-std=c++20", f"-I{torch_folder / 'include'}", f"-L{libraries}", "-lc10"]
        command = ["g++", str(_SOURCE), *options, f"-Wl,-rpath,{libraries}", "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.rename(path)  # another process may compile it too
    return path


class Record:
    """Counts while `on`.

    Attributes:
        waits (`Counter`): (path of the file from its package on, line, reason) -> number of host waits. The file is
            the innermost one of `_PACKAGES`.
        launches (`Counter`): operation -> number of kernels that it would launch.
        mixed (`list[str]`): operations on tensors of two devices. Each also raised an error, which code may catch.
    """

    def __init__(self) -> None:
        self.on = False
        self.clear()

    def clear(self) -> None:
        self.waits: Counter[tuple[str, int, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self.mixed: list[str] = []

    def wait(self, reason: str) -> None:
        if self.on:
            self.waits[(*_place(), reason)] += 1

    def launch(self, name: str) -> None:
        if self.on:
            self.launches[name] += 1

    def refuse(self, what: str) -> None:
        message = f"Expected all tensors to be on the same device: {what}, from %s:%d" % _place()
        self.mixed.append(message)
        raise RuntimeError(message)

    @contextlib.contextmanager
    def counting(self, on: bool) -> Iterator[None]:
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before


RECORD = Record()


class Memory:
    """Counts the storages on the device. The temporary memory of one kernel is not counted.

    Attributes:
        held (`int`), peak (`int`): bytes of live storages: now, and the most while `RECORD.on`.
    """

    def __init__(self) -> None:
        self.held = self.peak = 0
        self._known: set[int] = set()

    def count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.held += storage.nbytes()
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        if RECORD.on:
            self.peak = max(self.peak, self.held)

    def _freed(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.held -= size


MEMORY = Memory()


def _place() -> tuple[str, int]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for package in _PACKAGES:
            place = file[file.rindex(package) + 1 :] if package in file else ""
            # The clone's folder may be called trl_ext, and hold the environment
            if place and not place.startswith("trl_ext/tests/") and "site-packages/" not in place:
                return place, frame.f_lineno
        frame = frame.f_back
    return "elsewhere", 0


class Pretended(Tensor):
    """A tensor on the pretended device; `held` has its numbers, in host memory.

    A parameter is in host memory while its `data` is set to a host tensor.
    """

    held: Tensor
    on_host = False

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> "Pretended":
        made: Any = torch.Tensor._make_subclass(
            cls, held, requires_grad, dispatch_device=True, device_for_backend_keys=CUDA
        )
        made.held = held
        ORDER.allocated(made)
        MEMORY.count(held)
        return made

    device = property(lambda self: torch.device("cpu") if self.on_host else CUDA)
    is_cuda = property(lambda self: not self.on_host)
    is_cpu = property(lambda self: self.on_host)

    @property
    def data(self) -> Tensor:
        return _placed(self).detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.on_host = not isinstance(_placed(value), Pretended)
        if self.on_host:
            assert (value.shape, value.dtype) == (self.shape, self.dtype)
            # Frees what it had on the device
            Tensor.data.__set__(self, Pretended(torch.empty((), dtype=self.dtype).expand(self.shape)))
        else:
            Tensor.data.__set__(self, value)
        self.held = held(value)

    def get_device(self) -> int:
        return -1 if self.on_host else 0

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        ORDER.lent.setdefault(ORDER.key(self), set()).add(stream.number)

    def tolist(self) -> Any:
        RECORD.wait("tolist")
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = Pretended(self.held.detach().clone(), self.requires_grad)
            memo[id(self)] = nn.Parameter(copy, self.requires_grad) if hasattr(self, "_is_param") else copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class DeviceMode(TorchDispatchMode):
    """In the `with` block, tensors that are created on "cuda" are pretended."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def held(x: Any) -> Any:
    """Return the numbers of a pretended tensor, and anything else as it is."""
    return x.held if isinstance(x, Pretended) else x


def _placed(x: Any) -> Any:
    """Return a pretended tensor that lies in host memory as a plain one, and anything else as it is."""
    return x.held if isinstance(x, Pretended) and x.on_host else x


# Operations that launch nothing
_VIEWS = {
    *(
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "detach",
    ),
    *("alias", "as_strided", "split", "split_with_sizes", "unbind", "chunk", "diagonal", "unfold", "_reshape_alias"),
    *("lift_fresh", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "resize_"),
    *("detach", "view_as_real", "_local_scalar_dense", "equal", "is_same_size"),
}
# Operations that return a value, or a shape that depends on values
_WAITS = {
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "equal"),
    *("_local_scalar_dense", "bincount", "masked_scatter_backward", "is_nonzero", "allclose"),
}
_INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host, after the checks of CUDA, and count what it would cost."""
    if func is torch.ops.prim.device.default:
        return CUDA
    name = func._schema.name.split("::")[1]
    args, kwargs = tree_map(_placed, (args, kwargs))
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in tensors if isinstance(x, Pretended)]
    asked = kwargs.get("device")
    to_device = asked is not None and torch.device(asked).type == "cuda"
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    if not here and not to_device:
        if name not in _VIEWS and ORDER.writes:
            ORDER.run(func, [x for x in tensors if ORDER.knows(x)], [], on_host=True)
        return func(*args, **kwargs)
    if asked is not None:
        kwargs = {**kwargs, "device": HELD_ON}
    run = _INSTEAD.get(str(func), func)
    out = functools.partial(run, *tree_map(held, args), **tree_map(held, kwargs))
    if name == "_to_copy":
        leaves = isinstance(args[0], Pretended)
        arrives = to_device or (leaves and asked is None)
        RECORD.launch(name)
        copy = out()
        copy = _wrapped(copy.clone() if copy is held(args[0]) else copy) if arrives else copy
        ORDER.run(func, [args[0]], [copy])
        if leaves != arrives and not kwargs.get("non_blocking"):
            RECORD.wait("copy to the host" if leaves else "copy from the host")
            ORDER.waited()
        return copy
    if name == "copy_":
        crosses = isinstance(args[0], Pretended) != isinstance(args[1], Pretended)
        RECORD.launch(name)
        ORDER.run(func, [args[1]], [args[0]])
        out()
        if crosses and not kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
            RECORD.wait("copy between host and device")
            ORDER.waited()
        return args[0]
    for x in tensors:
        if isinstance(x, Pretended) or x.dim() == 0 or (name == "cat" and x.numel() == 0):
            continue
        if name not in _INDEXED or x.dtype not in (torch.long, torch.int, torch.bool):
            RECORD.refuse(f"{func} of cuda:0 and cpu {tuple(x.shape)} {x.dtype}")
        RECORD.wait("index on the host")
    if name in _WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        RECORD.wait(name)
        ORDER.waited()
    if name in _INDEXED and _reads_mask(name, args):
        RECORD.wait("boolean index")
    if name not in _VIEWS:
        RECORD.launch(name)
    # Operations in place return the tensors that they were given
    given = {id(x.held): x for x in here}
    result = out()
    if asked is None or to_device:
        result = tree_map(lambda x: _wrapped(given.get(id(x), x)) if isinstance(x, Tensor) else x, result)
    if name not in _VIEWS:
        _check_order(func, here, args, kwargs, result)
    return result


def _check_order(func: Any, here: list[Any], args: Any, kwargs: dict[str, Any], result: Any) -> None:
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(x, kwargs[x.name]) for x in func._schema.arguments if x.name in kwargs]
    written = {id(x) for argument, value in given if _is_written(argument) for x in tree_leaves(value)}
    made = [x for x in tree_leaves(result) if isinstance(x, Pretended) and all(x is not y for y in here)]
    ORDER.run(func, [x for x in here if id(x) not in written], [x for x in here if id(x) in written] + made)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _wrapped(x: Tensor) -> Tensor:
    return Pretended(x) if type(x) is Tensor else x


def _reads_mask(name: str, args: Any) -> bool:
    """Whether an index counts the true elements of a mask. Filling one mask's elements with a number does not."""
    masks = [x for x in args[1] if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
    accumulates = len(args) > 3 and args[3]
    one = "put" in name and args[2].numel() == 1 and sum(x is not None for x in args[1]) == 1
    return bool(masks) and not (one and not accumulates)


def _addmm_into_fp32(x: Tensor, a: Tensor, b: Tensor, dtype: Any, *, beta: Any = 1, alpha: Any = 1, out: Tensor) -> Any:
    """`addmm` with `out_dtype`, which the CPU lacks, and the checks of torch's CUDA version."""
    assert a.dim() == b.dim() == 2
    assert a.dtype == b.dtype
    assert dtype == out.dtype
    assert dtype == a.dtype or (dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16))
    assert x.dtype in (dtype, a.dtype)
    assert out.shape == (a.shape[0], b.shape[1])
    product = a.float() @ b.float() * alpha
    return out.copy_(product + beta * x if beta else product)


_INSTEAD = {"aten.addmm.dtype_out": _addmm_into_fp32}


class _OneKernel(torch.autograd.Function):
    """A function of tensors that counts as one launch in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, name: str, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.name, ctx.function = name, function
        ctx.save_for_backward(*tensors)
        RECORD.launch(name)
        with RECORD.counting(False):
            return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        RECORD.launch(ctx.name + " backward")
        tensors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with RECORD.counting(False), torch.enable_grad():
            return None, None, *torch.autograd.grad(ctx.function(*tensors), tensors, gradient)


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    if not torch.is_autocast_enabled("cuda"):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype("cuda")) for x in tensors]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: Any, causal: bool = False) -> Tensor:
    """Attention `(..., heads, tokens, size)` by its definition, in fp32; a bool mask is true for what is seen."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = (x.float().repeat_interleave(groups, -3, output_size=query.shape[-3]) for x in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1).nan_to_num() @ value).to(query.dtype)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    assert enable_gqa or query.shape[-3] == key.shape[-3]
    function = functools.partial(_attend, mask=attn_mask, scale=scale, causal=is_causal)
    return _OneKernel.apply("sdpa", function, *_as_autocast(query, key, value))


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: Any = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """torch's varlen attention, whose rows are aligned at their last token, with the demands of its CUDA kernel."""
    query, key, value = _as_autocast(query, key, value)
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.shape[-1] in range(8, 257, 8)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert all(isinstance(x, Pretended) for x in (cu_seq_q, cu_seq_k))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    starts = cu_seq_q.held, cu_seq_k.held
    assert [int(x.diff().max()) for x in starts] == [max_q, max_k]
    sizes = [x.diff().tolist() for x in starts]
    assert window_size[1] == 0  # causal

    def rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        parts = (query.split(sizes[0]), key.split(sizes[1]), value.split(sizes[1]))
        for q, k, v in zip(*parts, strict=True):
            ends = torch.arange(len(k) - len(q), len(k), device=q.device)
            distance = ends.unsqueeze(1) - torch.arange(len(k), device=q.device)
            seen = (distance >= 0) & (distance <= (window_size[0] if window_size[0] >= 0 else len(k)))
            outputs.append(_attend(*(x.transpose(0, 1) for x in (q, k, v)), seen, scale).transpose(0, 1))
        return torch.cat(outputs)

    return _OneKernel.apply("varlen", rows, query, key, value)


def one_kernel(function: Callable[..., None]) -> Any:
    """Return an object that is launched like a Triton kernel and runs `function`."""

    def launch(*args: Any, **kwargs: Any) -> None:
        RECORD.launch(f"triton {function.__name__}")
        with RECORD.counting(False):
            function(*args, **kwargs)

    return collections.defaultdict(lambda: launch)  # by grid


def _on_device(pretended: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `pretended` for pretended tensors; inspection shows the real signature."""

    @functools.wraps(real)
    def chosen(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (pretended if isinstance(query, Pretended) else real)(query, *args, **kwargs)

    return chosen


def moved(module: nn.Module) -> nn.Module:
    """Move parameters and buffers to the pretended device; tied ones stay tied."""
    made: dict[int, Any] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and not isinstance(param, Pretended):
                owner._parameters[name] = made.setdefault(
                    id(param), nn.Parameter(Pretended(param.detach()), param.requires_grad)
                )
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = _wrapped(buffer)
    return module


class Event:
    """An event, which knows the work that its stream had done when the event was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.done: Counter[int] = Counter()

    def record(self, stream: Any = None) -> None:
        self.done = Counter((stream or ORDER.current).done)

    def wait(self, stream: Any = None) -> None:
        (stream or ORDER.current).wait_event(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        RECORD.wait("synchronize")
        ORDER.host |= self.done


class Stream:
    """A stream. Its work ends at once, but dependent work on another stream must wait for it as on a device.

    Attributes:
        done (`Counter`): number of a stream -> how much of its work is sure to precede the next work of this stream.
    """

    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = next(_NUMBERS)
        self.done: Counter[int] = Counter()

    def wait_event(self, event: Event) -> None:
        self.done |= event.done

    def wait_stream(self, other: "Stream") -> None:
        self.done |= other.done

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record(self)
        return event  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        RECORD.wait("synchronize")
        ORDER.host |= self.done


class CudaRuntime:
    """`torch.cuda.cudart()`.

    Attributes:
        locked (`dict[int, int]`): address of locked host memory -> bytes.
        refuses (`bool`): whether the host cannot lock memory.
    """

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pages = {page for start, n in self.locked.items() for page in range(start >> 12, (start + n - 1 >> 12) + 1)}
        assert not pages & {*range(address >> 12, (address + size - 1 >> 12) + 1)}, "a page is locked twice"
        if not self.refuses:
            self.locked[address] = size
        return 2 * self.refuses  # cudaErrorMemoryAllocation

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


RUNTIME = CudaRuntime()
_NUMBERS = itertools.count()


class Order:
    """Checks that work waits for another stream before it reads what that one wrote, or overwrites what it used.

    Freed memory goes back to the stream that allocated it. The next work of that stream must wait for the other streams
    that used the memory, unless `record_stream` told the allocator about them.
    """

    def __init__(self) -> None:
        self.current = self.default = Stream()
        self.host: Counter[int] = Counter()  # work that the host has waited for
        self.all: Counter[int] = Counter()  # stream's number -> its work so far
        # storage -> what wrote it last, and what has read it since: (stream's number, its work)
        self.writes: dict[int, tuple[int, int]] = {}
        self.reads: dict[int, dict[int, int]] = {}
        self.lent: dict[int, set[int]] = {}  # storage -> numbers of streams, of `record_stream`
        self._owners: dict[int, int] = {}  # storage on the device -> number of the stream that allocated it
        self._others: dict[int, dict[int, int]] = {}  # the same -> what other streams have done with it last
        self._alive: dict[int, StorageWeakRef] = {}  # its number is not given to another storage
        self._in_host_memory: set[int] = set()

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def run(self, what: Any, read: list[Tensor], written: list[Tensor], *, on_host: bool = False) -> None:
        """Check the next work of the current stream or of the host, and record it."""
        stream = self.current
        if not on_host:
            stream.done |= self.host
            stream.done[stream.number] += 1
            self.all[stream.number] = stream.done[stream.number]
            self._check_freed(stream)
        seen = self.host if on_host else stream.done
        for x, writes in [*((x, False) for x in read), *((x, True) for x in written)]:
            key = self.key(x)
            if not isinstance(x, Pretended):
                self._in_host_memory.add(key)
            elif not on_host and stream.number != self._owners[key]:
                self._others.setdefault(key, {})[stream.number] = stream.done[stream.number]
            before = [self.writes[key]] if key in self.writes else []
            before += self.reads.get(key, {}).items() if writes else []
            for number, work in before:
                if seen[number] < work:
                    by = "the host" if on_host else f"stream {stream.number}"
                    self._refuse(f"{what} on {by} does not wait for stream {number}")
            if on_host:
                continue
            if writes:
                self.writes[key], self.reads[key] = (stream.number, stream.done[stream.number]), {}
            else:
                self.reads.setdefault(key, {})[stream.number] = stream.done[stream.number]

    def allocated(self, x: Pretended) -> None:
        """Record new memory of the current stream: others must wait for its work until now, which may have used it."""
        key, stream = self.key(x), self.current
        if key not in self._owners:
            self._owners[key] = stream.number
            self.writes.setdefault(key, (stream.number, stream.done[stream.number]))

    def _check_freed(self, stream: Stream) -> None:
        for key in [x for x in self._others if self._alive[x].expired()]:
            if self._owners[key] == stream.number:
                for number, work in self._others.pop(key).items():
                    if stream.done[number] < work and number not in self.lent.get(key, ()):
                        self._refuse(f"memory of stream {stream.number} is freed before stream {number} is done")

    def _refuse(self, what: str) -> None:
        message = f"{what}, from %s:%d" % _place()
        RECORD.mixed.append(message)
        raise RuntimeError(message)

    def waited(self, *, every: bool = False) -> None:
        """Record that the host waits for the current stream, or with `every` for all streams."""
        self.host |= self.all if every else self.current.done

    def knows(self, x: Tensor) -> bool:
        """Return whether a stream has worked on a tensor in host memory."""
        plain = type(x) is Tensor and x.layout == torch.strided
        return plain and StorageWeakRef(x.untyped_storage()).cdata in self._in_host_memory

    def key(self, x: Tensor) -> int:
        reference = StorageWeakRef(held(x).untyped_storage())
        key: int = reference.cdata
        if key not in self._alive:
            self._alive[key] = reference
            if len(self._alive) % 5000 == 0:
                for dead in [name for name, x in self._alive.items() if x.expired() and name not in self._others]:
                    self._in_host_memory.discard(dead)
                    for found in (self._alive, self.writes, self.reads, self.lent, self._owners):
                        found.pop(dead, None)  # type: ignore[attr-defined]
        return key


ORDER = Order()


# What torch.cuda says of the device
_CUDA_SAYS: dict[str, Any] = {
    **{"is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "is_bf16_supported": True},
    **{"device_count": 1, "current_device": 0, "get_device_capability": (9, 0), "get_device_name": "Pretended H100"},
    **{"mem_get_info": (70 << 30, 80 << 30), "memory_stats": {}, "is_current_stream_capturing": False},
    "get_device_properties": types.SimpleNamespace(
        multi_processor_count=132, total_memory=80 << 30, major=9, minor=0, name="Pretended H100"
    ),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    **dict.fromkeys(("_lazy_init", "init", "set_device", "empty_cache", "reset_peak_memory_stats"), None),
    **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"), None),
}


def _says(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def start() -> None:
    """Make torch in this process report one H100. What is not on "cuda" runs as before."""
    torch._C._set_only_lift_cpu_tensors(True)
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    for name, answer in _CUDA_SAYS.items():
        setattr(cuda, name, _says(answer))
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.synchronize = accelerator.synchronize = lambda *_: (RECORD.wait("synchronize"), ORDER.waited(every=True))
    cuda.Event, cuda.Stream, cuda.cudart = Event, Stream, lambda: RUNTIME
    cuda.current_stream = accelerator.current_stream = lambda *_: ORDER.current
    cuda.default_stream = lambda *_: ORDER.default
    cuda.stream = ORDER.on
    cuda.device = accelerator.device_index = _says(contextlib.nullcontext())
    accelerator.is_available, accelerator.device_count = _says(True), _says(1)
    accelerator.current_accelerator, accelerator.current_device_index = _says(torch.device("cuda")), _says(0)
    torch.optim.Optimizer._accelerator_graph_capture_health_check = _says(None)

    to = nn.Module.to

    def to_device(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type != "cuda":
            return to(self, *args, **kwargs)
        return moved(self if dtype is None else to(self, dtype))

    nn.Module.to = to_device  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, *_: moved(self)  # type: ignore[method-assign]

    functional, kernels, varlen = nn.functional, torch._C._nn, importlib.import_module("torch.nn.attention.varlen")
    functional.scaled_dot_product_attention = kernels.scaled_dot_product_attention = _on_device(
        _sdpa, functional.scaled_dot_product_attention
    )
    varlen.varlen_attn = _on_device(_varlen, varlen.varlen_attn)

    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        here = [isinstance(x, Pretended) for x in tensors]
        if any(here):
            RECORD.launch(f"triton {self.fn.__name__}")
            if not all(here):
                RECORD.refuse(f"the kernel {self.fn.__name__} of cuda:0 and cpu")
        before = [held(x).clone() for x in tensors]
        launch(self, *map(held, args), **{name: held(x) for name, x in kwargs.items()})
        if any(here):
            written = [x for x, was in zip(tensors, before, strict=True) if bool((held(x) != was).any())]
            ORDER.run(self.fn.__name__, [x for x in tensors if all(x is not y for y in written)], written)

    GridExecutor.__call__ = interpreted
