"""Triton's interpreter without repeated work: the same numbers in half the time."""

import numpy as np
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter


def prepare_once():
    """Patch the language once per launch, not at every call in it.

    Triton patches it again at each function call inside a kernel, which takes half of the time.
    """
    prepare, launch, ready = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def once(function):
        module = id(function.__globals__)
        if module in ready:
            return None
        languages = frozenset(
            id(v) for v in function.__globals__.values() if v is tl or v is tl.core
        )
        found = None if languages in ready else prepare(function)
        ready.update((module, languages))
        return found

    def anew(executor, *arguments, **options):
        ready.clear()
        return launch(executor, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, anew


def make_types_once():
    """Cache what depends only on types and shapes, which every operation computes again.

    What is wrong with a type or a shape is found as before: the first time, and not kept.
    """
    numpy_type, block, tensor = interpreter._get_np_dtype, core.block_type, core.tensor
    make_block, make_tensor = block.__init__, tensor.__init__
    numpy_types, blocks, shapes = {}, {}, {}

    def kept_numpy_type(dtype):
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = numpy_type(dtype)
        return numpy_types[dtype.name]

    def kept_block(self, element_ty, shape):
        sizes = tuple([s.value if type(s) is core.constexpr else s for s in shape])
        if not all(type(size) is int for size in sizes):
            return make_block(self, element_ty, shape)
        key = element_ty.name, sizes
        if key in blocks:
            self.__dict__.update(blocks[key], element_ty=element_ty)
        else:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        return None

    def kept_tensor(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[sizes]
        else:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel

    interpreter._get_np_dtype = kept_numpy_type
    block.__init__, tensor.__init__ = kept_block, kept_tensor


def leave_like_shapes():
    """Skip broadcasts of two blocks with the same shape."""
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_unlike(self, one, other):
        a, b = one.type, other.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return one, other
        return broadcast(self, one, other)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_unlike


def calculate_at_once():
    """Add, subtract, multiply and divide values of the same type directly.

    Also pointers and offsets. All other types take the usual path, and so does what
    overflows, to be reported.
    """
    tensor, triton = core.tensor, semantic.TritonSemantic

    def plain(value, kind):
        if type(value) is tensor:
            return value.dtype.name == kind
        return type(value) is int or (type(value) is float and kind == "fp32")

    def result(values, handle):
        shape, dtype = handle.data.shape, values[0].dtype
        blocks = [value.type for value in values if value.type.is_block()]
        if not blocks:
            return tensor(handle, dtype)
        for block in blocks:
            if block.scalar is dtype and tuple(block.shape.values) == shape:
                return tensor(handle, block)
        return tensor(handle, core.block_type(dtype, list(shape)))

    def at_once(name, operation, kinds):
        usual = getattr(triton, name)

        def calculate(self, one, other, *rest):
            values = [value for value in (one, other) if type(value) is tensor]
            kind = values[0].dtype.name if values else None
            if kind not in kinds or not (plain(one, kind) and plain(other, kind)):
                return usual(self, one, other, *rest)
            a, b = (v.handle.data if type(v) is tensor else v for v in (one, other))
            if kind == "int32":
                exact = operation(a, b, dtype=np.int64)
                data = exact.astype(np.int32)
                if (data != exact).any():
                    return usual(self, one, other, *rest)
            else:
                data = operation(a, b)
            return result(values, interpreter.TensorHandle(data, values[0].dtype))

        setattr(triton, name, calculate)

    at_once("add", np.add, ("fp32", "int32"))
    at_once("sub", np.subtract, ("fp32", "int32"))
    at_once("mul", np.multiply, ("fp32", "int32"))
    at_once("truediv", np.divide, ("fp32",))
    add = triton.add

    def add_offset(self, one, other, *rest):
        both = type(one) is tensor is type(other)
        if not (both and one.dtype.is_ptr() and other.dtype.name in ("int32", "int64")):
            return add(self, one, other, *rest)
        return result((one, other), self.builder.create_addptr(one.handle, other.handle))

    triton.add = add_offset
