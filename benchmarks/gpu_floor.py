"""A lower bound of any LSTM implementation's time, in milliseconds.

The bound is the longest of three times: the products at the rate of a large one; reading every
input and writing every result once at the rate of a large copy; and a barrier of all
multiprocessors in each step of each pass, since every unit of h needs every unit of the previous
step. Neither data saved for the backward pass nor normalization count: a plain LSTM has the same
bound.
"""

from dataclasses import dataclass

import torch

TYPES = {"tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Rates:
    """Measured rates of the GPU: operations per precision, bytes, and seconds per barrier."""

    operations: dict
    bytes: float
    meeting: float


def floors(shape, precision, rates):
    """Milliseconds of the forward pass, forward and backward together, and inference.

    shape: T, B, I, H, directions. The input has no gradient.
    """
    T, B, I, H, directions = shape  # noqa: E741
    size = TYPES[precision].itemsize
    rows, gates = T * B * directions, 4 * H
    forward = 2 * rows * gates * (I + H)
    weights = gates * (I + H) * directions
    moved = size * (T * B * I + weights + rows * H)
    # Backward: the gradients of h, of W_h and of W_x; the gradient of the output is read, those of
    # the weights are written.
    backward = 2 * rows * gates * (2 * H + I)
    moved_backward = size * (T * B * I + 2 * weights + 2 * rows * H)

    def longest(operations, moved, steps):
        seconds = (
            operations / rates.operations[precision],
            moved / rates.bytes,
            steps * rates.meeting,
        )
        return 1e3 * max(seconds)

    once = longest(forward, moved, T)
    both = longest(forward + backward, moved + moved_backward, 2 * T)
    return {"fwd": once, "fwdbwd": both, "infer": once}


def measured_rates(time):
    """Measure the rates of this GPU.

    time: returns the median time of a function in milliseconds.
    """
    n = 8192
    operations = {}
    for precision, dtype in TYPES.items():
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        operations[precision] = 2 * n**3 / time(lambda a=a, b=b: a @ b) * 1e3
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / time(lambda: target.copy_(source)) * 1e3
    return Rates(operations, copied, time_of_a_meeting(time))


def time_of_a_meeting(time, device="cuda"):
    """Seconds of one barrier of all multiprocessors, in Triton."""
    from gpu_barriers import barriers

    programs, rounds, options = 1, 3, {}
    if device == "cuda":
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        rounds, options = 2000, {"launch_cooperative_grid": True}
    counter = torch.zeros(1, dtype=torch.int32, device=device)

    def run():
        counter.zero_()
        barriers[(programs,)](counter, rounds, PROGRAMS=programs, **options)

    milliseconds = time(run)
    if counter.item() != programs * rounds:
        raise RuntimeError(
            f"{programs} programs passed {counter.item()} barriers instead of {rounds}"
        )
    return milliseconds / rounds / 1e3
