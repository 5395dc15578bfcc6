"""The kernel that centres a float32 z as a workload."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpf_jit.templates.triangle_multiplication.workload import _StageWorkload


class CentreWorkload(_StageWorkload):
    """Inputs: z float32 `(B, N, N, C)`, which bf16 does not hold, its pairs far from zero. Output: `z`, bfloat16, centred."""

    @property
    def bytes_per_set(self) -> int:
        """Bytes of z, read and written."""
        return 6 * self._pairs() * self.shape.channels

    def make_inputs(self, seed: int) -> Tensor:
        """z of a call; a pure function of both seeds."""
        return self.make_call(seed).z.float() * 1.001 + (0.03 if self.family == "small" else 30.0)

    def reference(self, inputs: Tensor) -> dict[str, Tensor]:
        """The same in float64, not rounded."""
        z = inputs.double()
        return {"z": z - z.mean(-1, keepdim=True)}

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors: one rounding; float32 knows the mean of pairs as far from zero as these to 1e-3 of that."""
        return {"z": self._bound(1.5, self._pairs() * self.shape.channels)}

    def _bind(self, kernel_fn: Callable[..., object], inputs: Tensor) -> tuple[Callable[[], None], dict[str, Tensor]]:
        out = torch.empty(inputs.shape, dtype=torch.bfloat16, device=inputs.device)
        return lambda: kernel_fn(inputs, out, self.num_ctas), {"z": out}
