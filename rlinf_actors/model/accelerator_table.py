"""Facts about accelerators, one row for each type: visibility variable, collective library, network variable.

The rows come from the vendors' documentation and from torch's back-ends (torch_npu, torch_musa, ...). Placement,
workers and collective groups look vendors up here. A new vendor is a row here, a row in hardware.vendors.catalog and a
module beside that.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rlinf_actors.errors import ConfigError, UsageError
from rlinf_actors.model.hardware import AcceleratorType, register_accelerator_type

GLOO_NIC_VARIABLE = "GLOO_SOCKET_IFNAME"
ALWAYS_NIC_VARIABLES = (GLOO_NIC_VARIABLE, "NCCL_SOCKET_IFNAME")
"""Set for the workers of every node: Gloo runs beside every CCL, and several CCLs read NCCL's variable too."""

EGL_DEVICE_VARIABLES = ("MUJOCO_EGL_DEVICE_ID", "EGL_DEVICE_ID")
"""Variables by which renderers choose a GPU: MuJoCo and robosuite read the first, other EGL renderers the second."""
RENDERER = "MUJOCO_GL"
_CPU_RENDERERS = frozenset({"osmesa", "glx"})


def renders_with_egl(environ: Mapping[str, str]) -> bool:
    """Return True if MuJoCo may render with EGL: robosuite takes EGL unless RENDERER is exactly osmesa or glx."""
    return environ.get(RENDERER) not in _CPU_RENDERERS


@dataclass(frozen=True)
class ProcessGroupFacts:
    """How torch.distributed makes a process group with a vendor's collective library (CCL).

    Attributes:
        process_group: ``module:class`` of the process group; its ``Options`` takes the options below. "" if the backend
            takes no options.
        options: mapping of each field of CollectiveGroupOptions to the attribute of ``Options`` that it sets; ``a.b``
            is attribute b of attribute a. Fields that are not listed have no effect.
        variables: environment variables that are set while a group is made.
        timeout_s: torch's own default timeout for operations of such a group, in seconds.
        log_setting: VARIABLE=VALUE that makes the CCL write a log; "" if there is none.
    """

    process_group: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 1800.0
    log_setting: str = ""


@dataclass(frozen=True)
class AcceleratorFacts:
    """Facts about one type of accelerator.

    Attributes:
        visibility_variable: environment variable that lists the devices a process may see; "" for NO_ACCEL.
        ccl: name of torch.distributed's backend for the devices; "" if there is none.
        torch_device_type: name of the devices in ``torch.device(name, index)``, and of torch's module for them.
        nic_variable: environment variable that chooses the network interface of the CCL; "" if there is none.
        visibility_prefix: text before the list of devices in the visibility variable.
        hide_all: value of the visibility variable that shows no device.
        numbering: variable and value that make the vendor's runtime number devices as the probe does; two empty texts
            if no variable is needed.
        renumbering: variables that change the meaning of device numbers in the visibility variable.
        torch_plugin: module that adds the device to torch; "" if torch has it.
        ccl_plugin: module that adds the backend to torch.distributed, if torch_plugin does not; else "".
        group: how a process group of the CCL is made.
        cuda_ipc: True if processes can share device memory by handles of CUDA's driver library.
        variables: variables that workers on such devices get unless they are set already.
        renders: True if renderers find the devices by EGL_DEVICE_VARIABLES.
    """

    visibility_variable: str
    ccl: str
    torch_device_type: str
    nic_variable: str
    visibility_prefix: str = ""
    hide_all: str = ""
    numbering: tuple[str, str] = ("", "")
    renumbering: tuple[str, ...] = ()
    torch_plugin: str = ""
    ccl_plugin: str = ""
    group: ProcessGroupFacts = ProcessGroupFacts()
    cuda_ipc: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    renders: bool = False

    def visibility_value(self, devices: Sequence[str]) -> str:
        """Return the value to which the visibility variable is set so that a process sees exactly *devices*.

        *devices* are indices or UUIDs as text.
        """
        return self.visibility_prefix + ",".join(devices) if devices else self.hide_all


_NCCL = ProcessGroupFacts(  # RCCL too, which torch uses under the names of NCCL
    "torch.distributed:ProcessGroupNCCL",
    {
        "is_high_priority_stream": "is_high_priority_stream",
        "accel_cluster_size": "config.cga_cluster_size",
        "accel_max_ctas": "config.max_ctas",
        "accel_min_ctas": "config.min_ctas",
    },
    # ProcessGroupNCCL's watchdogs end the process when a peer dies or a transfer stalls. Here the head says who
    # died, and the lane has its own clock; torch reads these while a group is made.
    variables={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"},
    timeout_s=600.0,  # torch.distributed's default_pg_nccl_timeout; the others have default_pg_timeout
    log_setting="NCCL_DEBUG=INFO",
)

_BUILT_IN: Mapping[AcceleratorType, AcceleratorFacts] = {
    AcceleratorType.NV_GPU: AcceleratorFacts(
        "CUDA_VISIBLE_DEVICES",
        "nccl",
        "cuda",
        "NCCL_SOCKET_IFNAME",
        # CUDA's default is the fastest first, NVML goes by bus (CUDA C++ Programming Guide, "Environment Variables").
        numbering=("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        group=_NCCL,
        cuda_ipc=True,
        # NCCL's cuMem allocator takes more memory beside CUDA graphs (NVIDIA/nccl issue 1234).
        variables={"NCCL_CUMEM_ENABLE": "0"},
        renders=True,
    ),
    # An empty HIP_VISIBLE_DEVICES counts as unset (ROCm's clr then looks at CUDA_VISIBLE_DEVICES); -1 ends the list.
    AcceleratorType.AMD_GPU: AcceleratorFacts(
        "HIP_VISIBLE_DEVICES",
        "nccl",
        "cuda",
        "NCCL_SOCKET_IFNAME",
        hide_all="-1",
        renumbering=("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),  # both work below HIP
        group=_NCCL,
    ),
    # SYCL's selector is backend:devices, and an empty one means "all", so that hiding needs a negative filter.
    AcceleratorType.INTEL_GPU: AcceleratorFacts(
        "ONEAPI_DEVICE_SELECTOR",
        "ccl",
        "xpu",
        "CCL_MNIC_NAME",
        visibility_prefix="level_zero:",
        hide_all="!*:gpu",
        renumbering=("ZE_AFFINITY_MASK",),  # of Level Zero, which SYCL counts the devices of
        torch_plugin="intel_extension_for_pytorch",  # torch has xpu itself since 2.4
        ccl_plugin="oneccl_bindings_for_pytorch",
        group=ProcessGroupFacts(log_setting="CCL_LOG_LEVEL=info"),
    ),
    AcceleratorType.NPU: AcceleratorFacts(
        "ASCEND_RT_VISIBLE_DEVICES",
        "hccl",
        "npu",
        "HCCL_SOCKET_IFNAME",
        torch_plugin="torch_npu",
        group=ProcessGroupFacts(
            "torch_npu._C._distributed_c10d:ProcessGroupHCCL",
            {"is_high_priority_stream": "is_high_priority_stream"},
            log_setting="ASCEND_GLOBAL_LOG_LEVEL=1",
        ),
    ),
    AcceleratorType.MUSA_GPU: AcceleratorFacts(
        "MUSA_VISIBLE_DEVICES",
        "mccl",
        "musa",
        "MCCL_SOCKET_IFNAME",
        torch_plugin="torch_musa",
        group=ProcessGroupFacts(log_setting="MCCL_DEBUG=INFO"),
    ),
    # Kunlun's own build of torch answers to CUDA's names; there is no module to import.
    AcceleratorType.KUNLUN_XPU: AcceleratorFacts(
        "CUDA_VISIBLE_DEVICES",
        "bkcl",
        "cuda",
        "BKCL_SOCKET_IFNAME",
        group=ProcessGroupFacts(log_setting="BKCL_DEBUG=1"),
    ),
    AcceleratorType.NO_ACCEL: AcceleratorFacts("", "", "cpu", ""),
}

_rows: dict[AcceleratorType, AcceleratorFacts] = dict(_BUILT_IN)
_owners: dict[AcceleratorType, str] = {}
"""The registering function of each row that is not built in."""

ACCELERATOR_TABLE: Mapping[AcceleratorType, AcceleratorFacts] = MappingProxyType(_rows)
"""The built-in rows, and those that packages have registered in this process."""


def register(name: str, facts: AcceleratorFacts, owner: str) -> AcceleratorType:
    """Add a row to ACCELERATOR_TABLE and return its type. Users call ``AcceleratorUtil.register_accelerator`` instead.

    *owner* names the registering function. The same owner may register a type again, as a module that is loaded twice
    does. Raise ValueError if *name* is not an identifier, is built in, or belongs to another owner.
    """
    if not name.isidentifier():
        raise ValueError(f"{name!r} cannot be a type of accelerator; choose an identifier, such as MY_TPU")
    kind = AcceleratorType.named(name)
    if kind in _BUILT_IN:
        raise ValueError(f"accelerator type {name} is built in; {owner} needs another name")
    if _owners.setdefault(kind, owner) != owner:
        raise ValueError(f"accelerator type {name} is registered by {_owners[kind]}; {owner} needs another name")
    _rows[kind] = facts
    return register_accelerator_type(name)


def facts_of(kind: AcceleratorType | str, registered_by: str = "") -> AcceleratorFacts:
    """Return the row of ACCELERATOR_TABLE for an accelerator type, or for its name.

    If this process does not know the type, raise ConfigError, which says what to install. *registered_by* is the module
    that registered the type on another node, for that message; "" if it is not known.
    """
    found = _rows.get(AcceleratorType.named(str(kind)))
    if found is None:
        source = f"module {registered_by}" if registered_by else "the module that registers it"
        raise ConfigError(
            f"there is no accelerator type {str(kind)!r} in this process; if it is not a slip of the pen, install the "
            f"package that has {source} here, or name that module in RLINF_EXT_MODULE. "
            f"Types: {', '.join(known.value for known in _rows)}"
        )
    return found


def torch_platform(accelerator: AcceleratorType | str) -> Any:
    """Import torch and return its module for devices of an accelerator type, such as ``torch.cuda``.

    Raise ImportError if torch is not installed. Raise UsageError if this torch has no such module and the vendor's
    plug-in does not add it.
    """
    facts = facts_of(accelerator)
    name, plugin = facts.torch_device_type, facts.torch_plugin
    torch = importlib.import_module("torch")
    if not hasattr(torch, name) and plugin:
        try:
            importlib.import_module(plugin)
        except Exception as error:
            raise UsageError(
                f"torch has no module torch.{name} here, and the vendor's plug-in {plugin} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error
    if not hasattr(torch, name):
        raise UsageError(f"torch has no module torch.{name} here" + (f", nor with {plugin}" if plugin else ""))
    return getattr(torch, name)


def device_variables() -> frozenset[str]:
    """Return all vendors' environment variables that choose the devices of a process, or change device numbers."""
    found = {""}
    for facts in _rows.values():
        found |= {facts.visibility_variable, facts.numbering[0], *facts.renumbering}
    return frozenset(found - {""})


def default_variables() -> frozenset[str]:
    """Return the variables that workers get by default, and those on which the defaults depend."""
    found = {name for facts in _rows.values() for name in facts.variables}
    return frozenset({*found, *EGL_DEVICE_VARIABLES, RENDERER})


def group_facts(ccl: str) -> ProcessGroupFacts:
    """Return how torch.distributed makes process groups with *ccl*, the name of a backend such as nccl.

    If no accelerator type has this backend, the facts are the defaults.
    """
    return next((facts.group for facts in _rows.values() if facts.ccl and facts.ccl == ccl), ProcessGroupFacts())
