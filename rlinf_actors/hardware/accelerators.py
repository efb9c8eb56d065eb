"""Accelerator and AcceleratorUtil: facts about accelerators for scripts, under RLinf's names. Public API."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

from rlinf_actors.hardware import profiler_windows
from rlinf_actors.hardware.probe_report import resource_from_report
from rlinf_actors.hardware.registry import Hardware
from rlinf_actors.hardware.vendors import catalog
from rlinf_actors.hardware.vendors.catalog import Find, Vendor
from rlinf_actors.hardware.vendors.machine import Machine
from rlinf_actors.hardware.visibility import hides_all
from rlinf_actors.model import accelerator_table
from rlinf_actors.model.accelerator_table import GLOO_NIC_VARIABLE, AcceleratorFacts, facts_of, torch_platform
from rlinf_actors.model.hardware import AcceleratorType, HardwareResource
from rlinf_actors.model.node import ANY_ACCELERATOR

_Found = TypeVar("_Found", bound=Find)


class AcceleratorUtil:
    """Look up facts about accelerator types, such as their environment variables. All methods are static. No method
    loads a vendor's library, and only get_torch_platform loads torch.

    An accelerator type is given as an AcceleratorType or by its name. An unknown type raises ConfigError.

    Attributes:
        CCL_SUPPORT_LIST: the types whose tensors RLinf sends by their own collective library.
    """

    CCL_SUPPORT_LIST: ClassVar[Sequence[AcceleratorType]] = [
        AcceleratorType.NV_GPU,
        AcceleratorType.AMD_GPU,
        AcceleratorType.MUSA_GPU,
    ]

    @staticmethod
    def get_accelerator_type(environ: Mapping[str, str] | None = None) -> AcceleratorType:
        """Return the accelerator type of this process.

        In a worker, the type comes from the placement. In any other process, the type is a guess from the files of this
        machine, unless a visibility variable such as CUDA_VISIBLE_DEVICES hides all devices of the type; for the exact
        type, use ``Cluster.get_node_info``.

        Args:
            environ: the environment, os.environ by default.

        Returns:
            The type; NO_ACCEL if there is no accelerator.
        """
        env = os.environ if environ is None else environ
        named = env.get("ACCELERATOR_TYPE")  # every worker has it, from its placement
        if named:
            return AcceleratorType.named(named)
        machine = Machine(env)
        vendors = (*catalog.VENDORS, *catalog.registered_vendors())
        for vendor in vendors:
            facts = facts_of(vendor.kind)
            hidden = hides_all(env.get(facts.visibility_variable), facts.hide_all)
            if not hidden and vendor.may_be_present(env, machine):
                return vendor.kind
        return AcceleratorType.NO_ACCEL

    @staticmethod
    def get_visibility_variable(accelerator_type: AcceleratorType | str) -> str:
        """Return the name of the environment variable that lists the visible devices of a type; "" for NO_ACCEL."""
        return facts_of(accelerator_type).visibility_variable

    @staticmethod
    def get_accelerator_env_var(
        accelerator_type: AcceleratorType | str, visible_accelerators: Sequence[str | int]
    ) -> dict[str, str]:
        """Return a mapping of one environment variable to its value, which limits a process to *visible_accelerators*.

        The mapping is empty for NO_ACCEL, which has no such variable.

        Args:
            accelerator_type: the type.
            visible_accelerators: indices or UUIDs of the devices, in the order in which the process sees them.
        """
        facts = facts_of(accelerator_type)
        if not facts.visibility_variable:
            return {}
        return {facts.visibility_variable: facts.visibility_value([str(device) for device in visible_accelerators])}

    @staticmethod
    def get_visible_devices(
        accelerator_type: AcceleratorType | str, environ: Mapping[str, str] | None = None
    ) -> list[int | str] | None:
        """Return the devices that the visibility variable of a type lists.

        Args:
            accelerator_type: the type.
            environ: the environment, os.environ by default.

        Returns:
            Indices as int and UUIDs as text, in the order of the variable; None if the variable is not set.
        """
        facts = facts_of(accelerator_type)
        value = (os.environ if environ is None else environ).get(facts.visibility_variable)
        if value is None:
            return None
        if value == facts.hide_all:
            return []
        entries = [part.strip() for part in value.removeprefix(facts.visibility_prefix).split(",")]
        return [int(entry) if entry.isdecimal() else entry for entry in entries if entry]

    @staticmethod
    def get_ccl_backend(accelerator_type: AcceleratorType | str) -> str:
        """Return the name of torch.distributed's backend for a type, such as nccl or hccl; gloo for NO_ACCEL."""
        return facts_of(accelerator_type).ccl or "gloo"

    @staticmethod
    def get_ccl_socket_ifname_env_var(accelerator_type: AcceleratorType | str) -> str:
        """Return the name of the environment variable that chooses the network interface of a type's collective
        library.

        For NO_ACCEL, that is the variable of gloo.
        """
        return facts_of(accelerator_type).nic_variable or GLOO_NIC_VARIABLE

    @staticmethod
    def get_device_type(accelerator_type: AcceleratorType | str) -> str:
        """Return torch's name for devices of a type, such as cuda or npu; cpu for NO_ACCEL."""
        return facts_of(accelerator_type).torch_device_type

    @staticmethod
    def get_torch_platform(accelerator_type: AcceleratorType | str) -> Any:
        """Import torch and return its module for devices of a type, such as ``torch.cuda``.

        Raises:
            ImportError: torch is not installed.
            UsageError: this torch has no such module, and the vendor's plug-in (torch_npu, ...) is not installed.
        """
        return torch_platform(accelerator_type)

    @staticmethod
    def get_accel_pg_options(accelerator_type: AcceleratorType | str, options: Any) -> Any:
        """Return the options of a process group of a type's backend. Imports torch.

        Args:
            accelerator_type: the type.
            options: a CollectiveGroupOptions, or None.

        Returns:
            The ``Options`` of the backend's process group; None if no option is set, or the backend takes none.
        """
        facts = facts_of(accelerator_type)
        if not facts.ccl or options is None or options.is_empty_options():
            return None
        # by name, since this package is below the one that makes process groups
        groups = importlib.import_module("rlinf_actors.messaging.process_groups")
        return groups.group_options(facts.ccl, options)

    @staticmethod
    def start_profiling(accelerator_type: AcceleratorType | str, step_idx: int | None = None) -> None:
        """Let the profiler that runs this process record from now on; without effect for types without a profiler.

        Imports torch. *step_idx* is the number of the training step, for the log.
        """
        profiler = profiler_windows.profiler_of(accelerator_type)
        if profiler is not None:
            profiler.start(step_idx)

    @staticmethod
    def stop_profiling(accelerator_type: AcceleratorType | str) -> None:
        """End what `start_profiling` has begun; without effect if nothing is recorded."""
        profiler = profiler_windows.profiler_of(accelerator_type)
        if profiler is not None:
            profiler.stop()

    @staticmethod
    def profiling_range(
        accelerator_type: AcceleratorType | str, label: str, color: str | None = None, domain: str | None = None
    ) -> AbstractContextManager[None]:
        """Return a context manager that shows its block as a range in the profile, while the profiler records.

        Args:
            accelerator_type: type of the accelerators of this process.
            label: name of the range.
            color, domain: not used.
        """
        return profiler_windows.profiling_range(accelerator_type, label)

    @staticmethod
    def register_accelerator(
        name: str,
        facts: AcceleratorFacts,
        *,
        devices: Sequence[str] = (),
        libraries: Sequence[str] = (),
    ) -> Callable[[_Found], _Found]:
        """Return a decorator that registers an accelerator type, together with the decorated function that finds its
        devices.

        The type is registered in this process only. To register it in all processes, do so in a module that
        RLINF_EXT_MODULE or an entry point of group ``rlinf_actors.accelerators`` names::

            def register():
                @AcceleratorUtil.register_accelerator(
                    "MY_TPU",
                    AcceleratorFacts("MY_TPU_VISIBLE_DEVICES", "mytccl", "tpu", "", torch_plugin="torch_mytpu"),
                    devices=("/dev/mytpu[0-9]*",),
                )
                def find(environ):
                    return FoundAccelerators([AcceleratorInfo("MY_TPU", "Model 1", index=0)], faults=[])

        The probe calls the function in a child process, with a time limit, and only if one of *devices* or *libraries*
        exists. The function gets the node's environment. It returns the accelerators that the visibility variable of
        the type does not hide; an exception becomes a fault of the node. To apply the visibility variable, call
        ``hardware.visibility.visible_devices``; to run tools with a time limit, use
        ``hardware.vendors.machine.Machine``.

        Args:
            name: name of the type, as in ``AcceleratorType(name)``, in placements and in ``AcceleratorInfo.type``.
            facts: facts about the type, such as its visibility variable and its collective backend.
            devices: glob patterns of the device files that the vendor's driver makes.
            libraries: file names of the vendor's library. It is searched in LD_LIBRARY_PATH and the usual directories.

        Raises:
            ValueError: the name is not an identifier, is built in, or is registered by another function.
        """

        def decorate(find: _Found) -> _Found:
            kind = accelerator_table.register(name, facts, f"{find.__module__}.{find.__qualname__}")
            catalog.add(Vendor(kind, tuple(devices), tuple(libraries), find.__module__, find=find))
            return find

        return decorate


class Accelerator(Hardware):
    """Find the accelerators of this machine by `enumerate`, the method that hardware types have.

    This class is not registered as a hardware type, because accelerators are detected and need no configuration.
    """

    HW_TYPE: ClassVar[str] = ANY_ACCELERATOR

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[Any] | None = None) -> HardwareResource | None:
        """Return the accelerators that the vendors' libraries report on this machine. Blocks, for about 8 s at most.

        Args:
            node_rank: not used; the machine is always this one.
            configs: not used.

        Returns:
            The accelerators of the first type found; None if there are none.
        """
        from rlinf_actors.hardware.probe import run_probe

        # A thread of its own, because the caller's may be running an event loop.
        with ThreadPoolExecutor(1, thread_name_prefix="probe") as thread:
            report = thread.submit(lambda: asyncio.run(run_probe())).result()
        return resource_from_report(report.resources[0]) if report.resources else None
