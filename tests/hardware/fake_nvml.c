/* An NVML with described devices, for the probe's tests; only the functions that the probe calls.
 *
 * FAKE_NVML_DEVICES  one device per ';': model,uuid,memory in MiB (default: eight H100 with UUIDs GPU-0..GPU-7).
 *                    MIG slices follow their GPU: MIG profile,uuid,MiB, such as MIG 1g.10gb,MIG-a,9728;
 *                    "MIG -,-,0" stands for a GPU in MIG mode without any. Slice numbers have a gap, as NVML's may.
 * FAKE_NVML_MODE     CALL=WHAT, e.g. init=hang: what nvml CALL does instead of answering. Calls: init, count, handle,
 *                    name, uuid, memory, utilization, mig, processes. What: hang, segfault, exit, garbage, fork, print, or an error number.
 *                    handle@2=15: only for device 2.
 * FAKE_NVML_PROCESSES  one process per ';': device,pid,MiB.
 * FAKE_NVML_PID_FILE gets the pid of the process that hangs, or of the one that was forked; may be a FIFO.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX 64

typedef struct {
    unsigned int index, mig, slices;
    int slice[7];
    char model[96], uuid[96];
    unsigned long long mib;
} device;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned int gpu, memory; } utilization;
typedef struct {
    char legacy[16];
    unsigned int domain, bus, device, pci_device, subsystem;
    char bus_id[32];
} pci;

static device devices[MAX];
static device parts[MAX];
static unsigned int count, part_count;
#define GARBAGE 1000

static void tell(pid_t pid) {
    const char *file = getenv("FAKE_NVML_PID_FILE");
    FILE *out = file ? fopen(file, "w") : NULL;
    if (!out) return;
    fprintf(out, "%d", pid);
    fclose(out);
}

static int misbehave(const char *call, int index) {
    const char *mode = getenv("FAKE_NVML_MODE");
    char wanted[32], what[32];
    int only = -1;
    if (!mode) return 0;
    if (sscanf(mode, "%31[a-z]@%d=%31s", wanted, &only, what) != 3 && sscanf(mode, "%31[a-z]=%31s", wanted, what) != 2)
        return 0;
    if (strcmp(wanted, call) || (only >= 0 && only != index)) return 0;
    if (!strcmp(what, "hang")) {
        tell(getpid());
        for (;;) pause();
    }
    if (!strcmp(what, "segfault")) raise(SIGSEGV);
    if (!strcmp(what, "exit")) { fputs("fake NVML gives up\n", stderr); exit(3); }
    if (!strcmp(what, "garbage")) return GARBAGE;
    if (!strcmp(what, "print")) { printf("{\"not\": \"the report\"}\n"); fflush(stdout); return 0; }
    if (!strcmp(what, "fork")) { /* a helper that outlives the call and keeps our files open, as nvidia-modprobe may */
        pid_t pid = fork();
        if (pid == 0) for (;;) pause();
        tell(pid);
        return 0;
    }
    return atoi(what);
}

static void describe(void) {
    const char *text = getenv("FAKE_NVML_DEVICES");
    char copy[8192], *save, *part;
    if (!text) text = "NVIDIA H100,GPU-0,81920;NVIDIA H100,GPU-1,81920;NVIDIA H100,GPU-2,81920;NVIDIA H100,GPU-3,81920;"
                      "NVIDIA H100,GPU-4,81920;NVIDIA H100,GPU-5,81920;NVIDIA H100,GPU-6,81920;NVIDIA H100,GPU-7,81920";
    snprintf(copy, sizeof copy, "%s", text);
    count = part_count = 0;
    for (part = strtok_r(copy, ";", &save); part && count < MAX; part = strtok_r(NULL, ";", &save)) {
        device *d = &devices[count];
        if (!strncmp(part, "MIG ", 4) && count) {
            device *gpu = &devices[count - 1], *slice = &parts[part_count];
            gpu->mig = 1;
            slice->index = gpu->index;
            if (sscanf(part, "%95[^,],%95[^,],%llu", slice->model, slice->uuid, &slice->mib) == 3 && slice->mib)
                gpu->slice[gpu->slices++] = (int)part_count++;
            continue;
        }
        d->index = count;
        d->mig = d->slices = 0;
        if (sscanf(part, "%95[^,],%95[^,],%llu", d->model, d->uuid, &d->mib) == 3) count++;
    }
}

int nvmlInitWithFlags(unsigned int flags) { describe(); return misbehave("init", -1); }
int nvmlShutdown(void) { return misbehave("shutdown", -1); }
const char *nvmlErrorString(int result) { return "Fake Error"; }

int nvmlDeviceGetCount_v2(unsigned int *out) {
    int error = misbehave("count", -1);
    *out = error == GARBAGE ? 4000000000u : count;
    return error == GARBAGE ? 0 : error;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device **out) {
    if (index >= count) return 2;
    *out = &devices[index];
    return misbehave("handle", (int)index);
}

int nvmlDeviceGetName(device *d, char *out, unsigned int size) {
    int error = misbehave("name", (int)d->index);
    snprintf(out, size, "%s", error == GARBAGE ? "\xff\xfe\x80" : d->model);
    return error == GARBAGE ? 0 : error;
}

int nvmlDeviceGetUUID(device *d, char *out, unsigned int size) {
    snprintf(out, size, "%s", d->uuid);
    return misbehave("uuid", (int)d->index);
}

int nvmlDeviceGetMemoryInfo(device *d, memory *out) {
    out->total = d->mib << 20;
    out->free = out->total;
    out->used = 0;
    return misbehave("memory", (int)d->index);
}

int nvmlDeviceGetPciInfo_v3(device *d, pci *out) {
    memset(out, 0, sizeof *out);
    out->bus = 0x10 + d->index;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return 0;
}

int nvmlDeviceGetUtilizationRates(device *d, utilization *out) {
    out->gpu = 7;
    out->memory = 1;
    return misbehave("utilization", (int)d->index);
}

int nvmlDeviceGetTemperature(device *d, int sensor, unsigned int *out) {
    *out = 41;
    return 0;
}

int nvmlDeviceGetMigMode(device *d, unsigned int *current, unsigned int *pending) {
    *current = *pending = d->mig;
    return misbehave("mig", (int)d->index);
}

int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned int *out) {
    *out = 7;
    return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned int index, device **out) {
    /* 0, 2, 3, ...: number 1 was destroyed */
    if (index == 1 || (index ? index - 1 : 0) >= d->slices) return 6;
    *out = &parts[d->slice[index ? index - 1 : 0]];
    return 0;
}

/* nvml.h: nvmlProcessInfo_v2_t */
typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int instance, compute_instance;
} process;

int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned int *room, process *out) {
    const char *text = getenv("FAKE_NVML_PROCESSES");
    char copy[8192], *save, *part;
    unsigned int number, pid, found = 0;
    unsigned long long mib;
    int error = misbehave("processes", (int)d->index);
    if (error) return error;
    snprintf(copy, sizeof copy, "%s", text ? text : "");
    for (part = strtok_r(copy, ";", &save); part; part = strtok_r(NULL, ";", &save)) {
        if (sscanf(part, "%u,%u,%llu", &number, &pid, &mib) != 3 || number != d->index) continue;
        if (out && found < *room) out[found] = (process){pid, mib << 20, ~0u, ~0u};
        found++;
    }
    error = found > *room ? 7 : 0; /* NVML_ERROR_INSUFFICIENT_SIZE */
    *room = found;
    return error;
}
