/* The wall clock of a process, by an hour too late and too early by turns, every second: for all
   code in it, C or Python. Loaded before libc by LD_PRELOAD. */

#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *told)
{
    struct timespec now;
    int status = (int)syscall(SYS_clock_gettime, clock, told);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
        told->tv_sec += now.tv_sec % 2 ? 3600 : -3600;
    }
    return status;
}

int gettimeofday(struct timeval *restrict told, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    told->tv_sec = now.tv_sec;
    told->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *told)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told)
        *told = now.tv_sec;
    return now.tv_sec;
}
