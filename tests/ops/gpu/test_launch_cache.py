"""Repeated launches of a compiled kernel, with other numbers or other tensors."""

import ctypes
import types

import pytest

pytest.importorskip("triton")

import torch

from rbn.ops.gpu.runtime import direct_launch, driver, launch_cache, triton_compiler
from rbn.ops.gpu.runtime.launch_cache import RepeatedLaunch, launch_cached


class Compiled:
    """Stands in for Triton's launch object: can be launched again by `compiled[grid](...)`."""

    packed_metadata = ()

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """A Triton function with two tensors, two numbers and two compile-time arguments."""

    arg_names = ("a", "b", "t", "rate", "UNITS", "SAVE")

    def __init__(self, compiled):
        self.compiled, self.calls = compiled, []

    def __getitem__(self, grid):
        def launch(*arguments, **flags):
            self.calls.append((grid, arguments, flags))
            return self.compiled

        return launch


@pytest.mark.parametrize("takes_all", [True, False])
def test_triton_looks_at_the_first_launch_alone(takes_all, monkeypatch):
    monkeypatch.setattr(launch_cache, "_TAKES_ALL", takes_all)
    kernel = Kernel(Compiled())
    a, b = torch.ones(3), torch.ones(4)
    flags = {"SAVE": True, "UNITS": 8, "num_warps": 4}
    step = RepeatedLaunch(kernel, (7,), [a, b], flags)
    for t in range(3):
        step(t, 0.5)
    assert kernel.calls == [((7,), (a, b, 0, 0.5), flags)]
    rest = (8, True) if takes_all else ()
    addresses = (a.data_ptr(), b.data_ptr())
    assert kernel.compiled.calls == [((7, 1, 1), (*addresses, t, 0.5, *rest)) for t in (1, 2)]
    RepeatedLaunch(kernel, (7,), [b, a], flags)(0, 0.5)  # also not in a call of another kind
    assert len(kernel.calls) == 1
    assert kernel.compiled.calls[2][1][:3] == (*addresses[::-1], 0)


@pytest.mark.parametrize("other", ["type", "alignment", "flag", "integer"])
def test_triton_looks_at_what_it_may_compile_for(other):
    kernel = Kernel(Compiled())
    memory = torch.zeros(8)
    tensors, flags, t = [memory[:4], memory[4:]], {"SAVE": True, "UNITS": 8}, 2
    RepeatedLaunch(kernel, (7,), tensors, flags)(t, 0.5)
    if other == "type":
        tensors = [memory[:4], memory[4:].to(torch.bfloat16)]
    elif other == "alignment":
        tensors = [memory[:4], memory[3:]]
    elif other == "flag":
        flags = flags | {"UNITS": 4}
    else:
        t = 2**31
    RepeatedLaunch(kernel, (7,), tensors, flags)(t, 0.5)
    assert len(kernel.calls) == 2


def test_the_interpreter_compiles_nothing():
    kernel = Kernel(None)
    step = RepeatedLaunch(kernel, (2, 3), [torch.ones(1)] * 2, {"SAVE": True, "UNITS": 8})
    step(0, 0.5)
    step(1, 0.5)
    assert [call[1][2] for call in kernel.calls] == [0, 1]


class Driver:
    """Stands in for the CUDA driver: knows a kernel's parameter size, and records launches."""

    def __init__(self, sizes):
        self.sizes, self.launches = sizes, []

    def cuCtxGetCurrent(self, context):
        context._obj.value = 1
        return 0

    def cuFuncGetParamInfo(self, function, at, offset, size):
        if at.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[at.value]
        return 0

    def cuLaunchKernel(self, function, *rest):
        *sizes, stream, places, _ = rest
        of_size = {4: ctypes.c_int32, 8: ctypes.c_int64}
        found = zip(self.sizes, places, strict=False)
        values = [of_size[size].from_address(place).value for size, place in found]
        self.launches.append((function.value, sizes, stream.value, values))
        return 0


class Loaded(Compiled):
    """Stands in for Triton's launch object, with everything that the driver needs to launch it."""

    def __init__(self, **metadata):
        super().__init__()
        names = ("a", "b", "t", "rate", "UNITS", "SAVE")
        kinds = ("*fp32", "*fp32", "i32", "fp32", "constexpr", "constexpr")
        self.src = types.SimpleNamespace(signature=dict(zip(names, kinds, strict=True)))
        self.function = 2**40 + 1
        plain = {"num_warps": 4, "shared": 64, "num_ctas": 1, "launch_pdl": False}
        self.metadata = types.SimpleNamespace(**plain, **metadata)


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("scratch", [0, 1, 2])  # pointers that some versions of Triton add
def test_the_driver_launches_the_other_steps(scratch, monkeypatch):
    cuda = Driver([8, 8, 4, 4, *[8] * scratch])
    monkeypatch.setattr(driver, "_driver", lambda: cuda)
    kernel = Kernel(Loaded())
    a, b = torch.ones(3), torch.ones(4)
    for _ in range(2):
        step = RepeatedLaunch(kernel, (7,), [a, b], {"SAVE": True, "UNITS": 8, "num_warps": 4})
        for t in range(3):
            step(t, 0.5)
    assert len(kernel.calls) == 1
    assert not kernel.compiled.calls
    half = 0x3F000000  # 0.5
    values = [[a.data_ptr(), b.data_ptr(), t, half, *[0] * scratch] for t in (1, 2, 0, 1, 2)]
    sizes = [7, 1, 1, 128, 1, 1, 64]
    assert cuda.launches == [(2**40 + 1, sizes, 77, found) for found in values]


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    "what", ["old driver", "sizes", "more parameters", "scratch", "hook", "compiled in"]
)
def test_other_launches_are_left_to_triton(what, monkeypatch):
    cuda = Driver([8, 8, 4, 8] if what == "sizes" else [8, 8, 4, 4])
    kernel = Kernel(Loaded(global_scratch_size=8 if what == "scratch" else 0))
    if what == "more parameters":
        cuda.sizes += [8, 8, 8]
    if what == "old driver":
        cuda.cuFuncGetParamInfo = None
    if what == "hook":
        monkeypatch.setattr(direct_launch, "_hooked", lambda found: True)
    if what == "compiled in":
        kernel.compiled.src.signature["t"] = "constexpr"
        cuda.sizes = [8, 8, 4]
    monkeypatch.setattr(driver, "_driver", lambda: cuda)
    step = RepeatedLaunch(kernel, (7,), [torch.ones(3)] * 2, {"SAVE": True, "UNITS": 8})
    for t in range(3):
        step(t, 0.5)
    assert len(kernel.compiled.calls) == 2
    assert not cuda.launches


def test_a_failed_launch_raises(monkeypatch, stream):
    cuda = Driver([8, 8, 4, 4])
    cuda.cuGetErrorString = lambda status, words: 0
    monkeypatch.setattr(driver, "_driver", lambda: cuda)
    step = RepeatedLaunch(Kernel(Loaded()), (7,), [torch.ones(3)] * 2, {"SAVE": True, "UNITS": 8})
    step(0, 0.5)
    cuda.cuLaunchKernel = lambda *arguments: 1
    step = RepeatedLaunch(Kernel(Loaded()), (7,), [torch.ones(3)] * 2, {"SAVE": True, "UNITS": 8})
    step(0, 0.5)
    with pytest.raises(RuntimeError, match="launching a step: "):
        step(1, 0.5)


def test_whoever_hooks_into_launches_is_heard(monkeypatch):
    import triton

    hooks = types.SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(triton, "knobs", types.SimpleNamespace(runtime=hooks), raising=False)
    assert not direct_launch._hooked(None)
    hooks.launch_enter_hook = types.SimpleNamespace(calls=[])
    assert not direct_launch._hooked(None)
    hooks.launch_enter_hook.calls.append(print)
    assert direct_launch._hooked(None)
    hooks.launch_enter_hook = print  # in other versions
    assert direct_launch._hooked(None)
    monkeypatch.delattr(triton, "knobs")
    assert not direct_launch._hooked(Compiled())
    monkeypatch.setattr(Compiled, "launch_exit_hook", print, raising=False)
    assert direct_launch._hooked(Compiled())


def test_one_launch_of_many_calls():
    """Triton is only called again if something other than addresses differs, or some are odd."""
    kernel = Kernel(Compiled())
    memory, asked = torch.zeros(16), []

    def launch(first, rate=0.5, units=8):
        tensors = [memory[first : first + 2], memory[8:]]
        addresses = tuple(tensor.data_ptr() for tensor in tensors)

        def ask():
            asked.append(first)
            return tensors

        flags = {"UNITS": units, "SAVE": True}
        launch_cached(kernel, (3, 2), addresses, ask, (5, rate), flags, (torch.float32,), memory)

    launch(0)
    launch(4)
    assert asked == [0]
    ((grid, arguments),) = kernel.compiled.calls
    assert grid == (3, 2, 1)
    rest = (8, True) if launch_cache._TAKES_ALL else ()
    assert arguments == (memory[4:].data_ptr(), memory[8:].data_ptr(), 5, 0.5, *rest)
    launch(1)  # not at a multiple of 16 bytes
    launch(0, rate=0.25)
    launch(0, units=4)
    assert asked == [0, 1, 0, 0]
    launch(4, units=4)
    assert len(asked) == 4


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("compiled_in", [False, True])
def test_the_driver_launches_the_other_calls(compiled_in, monkeypatch):
    """With the addresses of each, and without the numbers that the kernel was compiled for."""
    kernel = Kernel(Loaded())
    if compiled_in:
        kernel.compiled.src.signature["t"] = "constexpr"
    cuda = Driver([8, 8, *([] if compiled_in else [4]), 4, 8, 8])
    monkeypatch.setattr(driver, "_driver", lambda: cuda)
    memory = torch.zeros(16)
    pairs = [(memory[k : k + 4], memory[8:]) for k in (0, 4, 0)]
    for pair in pairs:
        addresses = tuple(tensor.data_ptr() for tensor in pair)
        flags = {"UNITS": 8, "SAVE": True, "num_warps": 4}
        launch_cached(
            kernel, (3, 2), addresses, lambda pair=pair: pair, (1, 0.5), flags, (), memory
        )
    assert len(kernel.calls) == 1
    assert not kernel.compiled.calls
    numbers = [*([] if compiled_in else [1]), 0x3F000000, 0, 0]
    values = [[a.data_ptr(), b.data_ptr(), *numbers] for a, b in pairs[1:]]
    sizes = [3, 2, 1, 128, 1, 1, 64]
    assert cuda.launches == [(2**40 + 1, sizes, 77, found) for found in values]


@pytest.fixture
def compile_first(monkeypatch):
    """Makes the compiler return a kernel that is not loaded yet."""
    asked = []

    def given(compiled):
        def compile_for(kernel, tensors, numbers, flags):
            asked.append((*tensors, *numbers, flags))
            return compiled

        compiled.function, compiled.asm = None, {"cubin": b"machine code"}
        compiled.metadata.name = "kernel_0"
        monkeypatch.setattr(triton_compiler, "compile_for", compile_for)
        return Kernel(compiled), asked

    return given


class Loader(Driver):
    """Also loads machine code."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.loaded, self.attributes = [], []

    def cuModuleLoadData(self, module, code):
        self.loaded.append(code)
        return 0

    def cuModuleGetFunction(self, function, module, name):
        assert name == b"kernel_0"
        function._obj.value = 2**40 + len(self.loaded)
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((attribute, value))
        return 0


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("repeated", [False, True])
def test_the_driver_also_makes_the_first_launch(repeated, compile_first, monkeypatch):
    """So Triton's own driver and launchers, which it builds with a C compiler, are not needed."""
    compiled, cuda = Loaded(), Loader([8, 8, 4, 4])
    kernel, asked = compile_first(compiled)
    monkeypatch.setattr(driver, "_driver", lambda: cuda)
    memory, flags = torch.zeros(16), {"UNITS": 8, "SAVE": True}
    pairs = [(memory[k : k + 4], memory[8:]) for k in (0, 4)]
    for a, b in pairs:
        if repeated:
            RepeatedLaunch(kernel, (3, 2), (a, b), flags)(1, 0.5)
        else:
            launch_once(kernel, (a, b), flags)
    assert asked == [(*pairs[0], 1, 0.5, flags)]
    assert not kernel.calls
    assert not compiled.calls
    assert cuda.loaded == [b"machine code"]
    assert cuda.attributes == [(driver._DYNAMIC_SHARED, 64)]
    sizes = [3, 2, 1, 128, 1, 1, 64]
    values = [[a.data_ptr(), b.data_ptr(), 1, 0x3F000000] for a, b in pairs]
    assert cuda.launches == [(2**40 + 1, sizes, 77, found) for found in values]


def launch_once(kernel, pair, flags):
    addresses = tuple(tensor.data_ptr() for tensor in pair)
    launch_cached(kernel, (3, 2), addresses, lambda: pair, (1, 0.5), flags, (), pair[0])


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("why", ["hook", "scratch", "unaligned"])
def test_triton_makes_the_first_launch_if_it_must(why, repeated, compile_first, monkeypatch):
    kernel, asked = compile_first(Loaded(global_scratch_size=8 if why == "scratch" else 0))
    monkeypatch.setattr(driver, "_driver", lambda: Loader([8, 8, 4, 4]))
    if why == "hook":
        monkeypatch.setattr(direct_launch, "_hooked", lambda found: True)
    memory, flags = torch.zeros(16), {"UNITS": 8, "SAVE": True}
    pair = (memory[why == "unaligned" :][:4], memory[8:])
    if repeated:
        RepeatedLaunch(kernel, (3, 2), pair, flags)(1, 0.5)
    else:
        launch_once(kernel, pair, flags)
    assert len(kernel.calls) + len(kernel.compiled.calls) == 1
    assert bool(asked) == (why != "unaligned")
