"""Times a layer for the GPU benchmark: with CUDA events, eager and in CUDA graphs."""

import time

import torch
from gpu_floor import TYPES
from gpu_layers import make_layer
from gpu_rows import AUTOCAST, BATCH_FIRST, CUDNN, GRAPH, LENGTHS, PACKED, SCRIPTED

DEVICE = "cuda"
SECONDS = 0.3  # for the samples of one result, or of three


def sample(function, repeats):
    """Milliseconds of some calls: as many as requested, or fewer if they take long."""
    samples, began = [], time.perf_counter()
    for k in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if k >= 2:  # the first ones warm up
            samples.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
        if len(samples) >= 3 and time.perf_counter() - began > SECONDS:
            break
    return samples


class Ready:
    """A layer on the GPU with its input, and the functions to time."""

    def __init__(self, what, shape, precision):
        T, B, I, H, directions = shape  # noqa: E741
        torch.manual_seed(0)
        self.autocast = TYPES[precision] if AUTOCAST in what else None
        dtype = torch.float32 if self.autocast else TYPES[precision]
        self.layer = make_layer(what, shape).to(DEVICE, dtype)
        first = (B, T) if BATCH_FIRST in what else (T, B)
        self.x = torch.randn(*first, I, device=DEVICE, dtype=dtype)
        self.grad = torch.randn(*first, H * directions, device=DEVICE, dtype=self.autocast or dtype)
        self.options, self.packed = {}, PACKED in what
        if self.packed or LENGTHS in what:  # T for the longest, half of it for the shortest
            lengths = torch.linspace(T, (T + 1) // 2, B).long()
            if self.packed:
                pack = torch.nn.utils.rnn.pack_padded_sequence
                self.x, self.grad = pack(self.x, lengths), pack(self.grad, lengths).data
            else:
                self.options["lengths"] = lengths
        if what.startswith(CUDNN):
            self.layer.flatten_parameters()

    def forward(self):
        if self.autocast is None:
            output = self.layer(self.x, **self.options)[0]
        else:
            with torch.autocast(DEVICE, self.autocast):
                output = self.layer(self.x, **self.options)[0]
        return output.data if self.packed else output

    def both(self):
        self.layer.zero_grad(set_to_none=True)
        output = self.forward()
        output.backward(self.grad.to(output.dtype))  # cuDNN's is float16 under any autocast

    @torch.no_grad()
    def infer(self):
        self.forward()

    def each(self):
        """The three functions by name, each with the layer in the right mode."""
        self.layer.train()
        yield "fwd", self.forward
        yield "fwdbwd", self.both
        self.layer.eval()
        yield "infer", self.infer

    def called(self, repeats):
        self.layer.train()
        for _ in range(2):
            self.both()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.both()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        return {name: sample(run, repeats) for name, run in self.each()} | {"peak_mb": peak}

    def captured(self, repeats):
        if self.options:  # while a graph is captured, the host cannot read lengths
            self.options = {"lengths": self.options["lengths"].to(DEVICE)}
        return {name: sample(capture(run).replay, repeats) for name, run in self.each()}


def capture(function):
    """A call as a CUDA graph: its time without the host's share."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def measure(what, shape, precision, repeats):
    """The results of a layer, eager and in a CUDA graph, by the names of their rows."""
    ready = Ready(what, shape, precision)
    yield what, ready.called(repeats)
    if what == SCRIPTED:  # which is used in eager mode
        return
    if PACKED not in what or what.startswith(CUDNN):  # ours has its lengths on the CPU
        yield what + GRAPH, ready.captured(repeats)
