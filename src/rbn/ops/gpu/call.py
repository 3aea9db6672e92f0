"""What a forward and a backward call of the GPU's LSTM have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu import device, paths
from rbn.ops.gpu.plan import Plan, tf32_allowed
from rbn.ops.gpu.signature import Inputs
from rbn.ops.gpu.stepwise import zone
from rbn.ops.types import valid_steps

VECTORS = ("bias", "gamma_x", "gamma_h", "gamma_c", "beta_c")
MOMENTS = ("mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c")
NONE, BATCH, GIVEN = device.NONE.value, device.BATCH.value, device.GIVEN.value


def aligned(tensor: Tensor) -> Tensor:
    """The same at an address that is a multiple of 16, which views need not begin at.

    Kernels, cuBLAS's too, read others in other pieces, and so might add in another order.
    """
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


class Call:
    """Sizes, modes and arguments, in the form that the kernels take.

    Attributes:
        given: the operator's arguments as they came.
        lead: ``(R,)``, or nothing where they have no leading dimension.
        a: the same with an input term ``[R, T, B, 4H]`` in any case. Of all else the kernels see
            the memory alone, which a dimension of one does not change.
    """

    def __init__(self, given: Inputs) -> None:
        self.given, self.lead = given, given.lead
        wx = aligned(given.wx.contiguous())
        self.wx = wx if self.lead else wx[None]
        self.a = a = given._replace(wx=self.wx)
        self.R, self.T, self.B, G = self.wx.shape
        self.H = G // 4
        self.path = paths.choose(a)
        self.in_cuda = self.path == paths.CUDA
        self.empty = wx.new_empty(1, dtype=torch.float32)
        term = GIVEN if a.population else BATCH
        normalized = a.norm == "batch"
        self.x = NONE if not normalized or a.joint else GIVEN if a.sequence else term
        self.flags: dict[str, int] = {
            "X": self.x,
            "NORM": term if normalized else NONE,
            "CELL": term if normalized and a.gamma_c is not None else NONE,
        }
        self.lengths = self.inv_n = self.empty
        if a.lengths is not None:
            self.lengths = a.lengths.to(device=wx.device, dtype=torch.int32)
            valid = valid_steps(self.lengths, self.T)
            assert valid is not None
            n = valid.sum(1)
            self.inv_n = torch.where(n > 0, 1.0 / n.clamp(min=1), 0.0).to(torch.float32)

    @property
    def plan(self) -> Plan:
        """How a persistent kernel runs."""
        plan = paths.plan_for(self.wx)
        assert plan is not None
        return plan

    @property
    def zoned(self) -> bool:
        """Whether units keep their value."""
        a = self.a
        return a.mask_c is not None or a.mask_h is not None or bool(a.rate_c or a.rate_h)

    def full(self, value: Tensor | None) -> Tensor:
        """In float32 and contiguous; anything where it is absent."""
        if value is None:
            return self.empty
        if value.dtype == torch.float32:
            return value.contiguous()
        return value.to(torch.float32, memory_format=torch.contiguous_format)

    def vectors(self) -> list[Tensor]:
        """The parameters `VECTORS` in float32; rounded ones are widened all at once."""
        a = self.a
        given = (a.bias, a.gamma_x, a.gamma_h, a.gamma_c, a.beta_c)
        present = [v for v in given if v is not None]
        if len(present) < 2 or any(v.dtype != present[0].dtype for v in present):
            return [self.full(v) for v in given]
        if present[0].dtype == torch.float32:
            return [self.full(v) for v in given]
        # Each begins at a multiple of 16 bytes: those of 4H come first.
        flat = [v.reshape(-1) for v in present] if self.lead else present
        joined = torch.cat(flat).to(torch.float32)
        parts = iter(joined.split([v.numel() for v in present]))
        return [self.empty if v is None else next(parts) for v in given]

    def masks(self) -> list[Tensor]:
        """Zoneout masks as bytes."""
        return [
            self.empty if m is None else m.contiguous().view(torch.uint8)
            for m in (self.a.mask_c, self.a.mask_h)
        ]

    def named(self, weight: Tensor, moments: list[Tensor]) -> dict[str, Tensor]:
        """What both kernels in CUDA C++ take, by the names they use."""
        present = [m if m.numel() else self.empty for m in moments]
        return {
            "wx": self.wx,
            "weight": weight,
            **dict(zip(VECTORS, self.vectors(), strict=True)),
            **dict(zip(MOMENTS, present, strict=True)),
            "lengths": self.lengths,
            "inv_n": self.inv_n,
        }

    def launch(
        self, kernel: Any, arguments: list[Any], flags: dict[str, Any], warps: int, stages: int
    ) -> None:
        """Launch a Triton kernel once."""
        options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        if self.plan.persistent:
            options["launch_cooperative_grid"] = True
        grid = (self.plan.programs, self.R)
        with torch.cuda.device_of(self.wx):
            kernel[grid](*arguments, **self.flags, **self._persistent_options(), **flags, **options)

    def options(self) -> dict[str, Any]:
        """What every Triton kernel of the LSTM is told besides `flags`."""
        a = self.a
        return {
            "H": self.H,
            "JOINT": a.joint,
            "PASS": a.pass_normalized_cell,
            "HAS_BIAS": a.bias is not None,
            "HAS_BETA": a.beta_c is not None,
            "LENGTHS": a.lengths is not None,
            "INCLUDE": a.include,
            "ZONE_C": zone(a.mask_c, a.rate_c),
            "ZONE_H": zone(a.mask_h, a.rate_h),
            "FUSED": a.wx.is_cuda,
        }

    def _persistent_options(self) -> dict[str, Any]:
        plan = self.plan
        return self.options() | {
            "PERSIST": plan.persistent,
            "PRECISION": "tf32" if tf32_allowed() else "ieee",
            "WIDEN": not _has_product(self.wx),
            "ROWS": plan.rows,
            "UNITS": plan.units,
            "PROGRAMS": plan.programs,
        }


def _has_product(wx: Tensor) -> bool:
    """Whether products are made in the type of wx."""
    if not wx.is_cuda:
        return False  # the interpreter
    return wx.dtype != torch.bfloat16 or torch.cuda.get_device_capability(wx.device) >= (8, 0)


def rows_of(moments: list[Tensor]) -> list[int]:
    """The number of rows of the terms x, h and c."""
    return [m.shape[-2] if m.numel() else 0 for m in moments[0::2]]
