"""Vendor facts, one row an accelerator type: how to hide devices, which collectives, which NIC variable.

The rows are those of the vendors' own documentation and of torch's back-ends (torch_npu, torch_musa, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rlinf_actors.model.hardware import AcceleratorType

ALWAYS_NIC_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Gloo runs beside every CCL, so its network variable is set whatever the node has."""


@dataclass(frozen=True)
class AcceleratorFacts:
    """What the rest of the code needs to know of a vendor.

    Attributes:
        visibility_variable: lists the devices that a process may see; "" without accelerator.
        ccl: torch.distributed's backend for this device, "" where there is none.
        torch_device_type: the name in ``torch.device(name, index)``.
        nic_variable: the CCL's network interface variable, "" where there is none.
        visibility_prefix: what precedes the list of devices in the variable.
        hide_all: value of the variable that shows no device.
    """

    visibility_variable: str
    ccl: str
    torch_device_type: str
    nic_variable: str
    visibility_prefix: str = ""
    hide_all: str = ""

    def visibility_value(self, devices: Sequence[str]) -> str:
        """The variable's value that shows *devices* (indices or UUIDs as text) and no other."""
        return self.visibility_prefix + ",".join(devices) if devices else self.hide_all


ACCELERATOR_TABLE: Mapping[AcceleratorType, AcceleratorFacts] = MappingProxyType(
    {
        AcceleratorType.NV_GPU: AcceleratorFacts("CUDA_VISIBLE_DEVICES", "nccl", "cuda", "NCCL_SOCKET_IFNAME"),
        AcceleratorType.AMD_GPU: AcceleratorFacts("HIP_VISIBLE_DEVICES", "nccl", "cuda", "NCCL_SOCKET_IFNAME"),
        # SYCL's selector is backend:devices, and an empty one means "all", so that hiding needs a negative filter.
        AcceleratorType.INTEL_GPU: AcceleratorFacts(
            "ONEAPI_DEVICE_SELECTOR", "ccl", "xpu", "CCL_MNIC_NAME", visibility_prefix="level_zero:", hide_all="!*:gpu"
        ),
        AcceleratorType.NPU: AcceleratorFacts("ASCEND_RT_VISIBLE_DEVICES", "hccl", "npu", "HCCL_SOCKET_IFNAME"),
        AcceleratorType.MUSA_GPU: AcceleratorFacts("MUSA_VISIBLE_DEVICES", "mccl", "musa", "MCCL_SOCKET_IFNAME"),
        AcceleratorType.KUNLUN_XPU: AcceleratorFacts("CUDA_VISIBLE_DEVICES", "bkcl", "cuda", "BKCL_SOCKET_IFNAME"),
        AcceleratorType.NO_ACCEL: AcceleratorFacts("", "", "cpu", ""),
    }
)

VISIBILITY_VARIABLES: Mapping[AcceleratorType, str] = MappingProxyType(
    {kind: facts.visibility_variable for kind, facts in ACCELERATOR_TABLE.items()}
)
"""Accelerator type to the variable that lists the visible devices."""
