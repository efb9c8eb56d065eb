/* The lease page of a robot worker, for control loops that Python cannot stop.
 *
 * Give the loop self.lease_page.address, or the fd to map in another process, and check the page right before each
 * command to the robot. When the answer is 0, send nothing more and return: the worker's on_lease_lost stops the robot.
 */
#ifndef RLINF_LEASE_H
#define RLINF_LEASE_H

#include <stdint.h>
#include <time.h>

/* The page begins with a uint64_t in this machine's byte order: nanoseconds of CLOCK_MONOTONIC.
 *
 * Return 1 while the worker may move its robots, else 0. Takes some 30 ns; any thread, no system call. */
static inline int rlinf_lease_held(const void *page) {
    uint64_t deadline_ns = __atomic_load_n((const uint64_t *)page, __ATOMIC_ACQUIRE);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec < deadline_ns;
}

#endif
