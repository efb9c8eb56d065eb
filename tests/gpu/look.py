"""CUDA IPC by hand between two processes, step by step: for a machine where tests/gpu fails. Not a test."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from typing import Any


def receiver(pipe: Any) -> None:
    import torch

    from rlinf_actors.messaging import cuda_ipc
    from rlinf_actors.messaging.cuda_ipc import Driver

    driver = Driver()
    print("receiver: uuid", driver.uuid(0), flush=True)
    try:
        handle, offset, size, event = pipe.recv()
        start = time.perf_counter()
        released = []
        tensor = cuda_ipc.opened(driver, 0, handle, offset, size, cuda_ipc.MemoryLease(lambda: released.append(1)))
        print(f"receiver: opened in {time.perf_counter() - start:.6f} s", flush=True)
        cuda_ipc.wait_for(0, event)
        print("receiver: event waited for", flush=True)
        print("receiver: values", tensor[:4].tolist(), "sum", tensor.sum().item(), torch.cuda.memory_allocated())
    except BaseException:  # noqa: BLE001 - it is shown
        traceback.print_exc()
    pipe.send("done")


def main() -> None:
    import torch

    from rlinf_actors.messaging import cuda_ipc
    from rlinf_actors.messaging.cuda_ipc import Driver

    print(torch.__version__, torch.cuda.get_device_name(0), os.uname().release)
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receiver, args=(theirs,))
    process.start()
    driver = Driver()
    print("sender: uuid", driver.uuid(0))
    tensor = torch.full((256 << 20,), 3, dtype=torch.uint8, device="cuda")
    start = time.perf_counter()
    handle, offset, _kept = cuda_ipc.export(driver, tensor)
    event = cuda_ipc.event(0)
    print(f"sender: exported in {time.perf_counter() - start:.6f} s at offset {offset}")
    pipe.send((handle, offset, tensor.numel(), bytes(event.ipc_handle())))
    print("sender:", pipe.recv() if pipe.poll(60) else "no answer in 60 s")
    process.join(10)
    print("receiver ended with", process.exitcode)


if __name__ == "__main__":
    main()
