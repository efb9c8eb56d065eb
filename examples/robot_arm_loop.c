/* A control loop that runs without Python: see robot_arm.py --native. */
#include <rlinf_lease.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

/* Move the arm 500 times a second while the worker holds the robot lease. Return the number of commands. */
long stream(const void *lease_page, int arm) {
    const struct timespec cycle = {0, 2000000};
    long sent = 0;
    char command[32];
    while (rlinf_lease_held(lease_page)) { /* check right before each command */
        int length = snprintf(command, sizeof command, "move %.6f\n", 0.001 * (double)(sent % 1000));
        if (write(arm, command, (size_t)length) != length) break;
        sent++;
        nanosleep(&cycle, NULL);
    }
    return sent; /* in Python this thread is stopped, and on_lease_lost stops the arm */
}
