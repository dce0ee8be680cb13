/* Segment files, opened and closed without waiting. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/file.h>

#include "hash.h"
#include "kvfs_native.h"
#include "now.h"

int kvfs_is_linked(int fd) {
    struct stat st;
    return !fstat(fd, &st) && st.st_nlink > 0;
}

int kvfs_close(int fd) { return close(fd); }

int kvfs_take(int32_t *fd) {
    int taken = *fd;
    *fd = -1;
    return taken;
}

static int open_now(int folder, const char *name) {
    int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
#ifdef KVFS_MAY_WAIT
    return openat(folder, name, flags);
#else
    enum { CACHED = 0x20 }; /* RESOLVE_CACHED */
    struct { uint64_t flags, mode, resolve; } how = {(uint64_t)flags, 0, CACHED};
    return (int)syscall(SYS_openat2, folder, name, &how, sizeof how);
#endif
}

void kvfs_open_segments(int folder, const uint8_t *ids, uint64_t count, int32_t *fds) {
    for (uint64_t i = 0; i < count; i++) {
        char name[40];
        for (int j = 0; j < 16; j++) snprintf(name + 2 * j, 3, "%02x", ids[16 * i + (uint64_t)j]);
        memcpy(name + 32, ".kvs", 5);
        struct stat st;
        int fd = open_now(folder, name);
        /* an unlink happens under LOCK_EX: under LOCK_SH the number of names stays what it is */
        int fine = fd >= 0 && !flock(fd, LOCK_SH | LOCK_NB) && !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_nlink;
        if (fd >= 0 && !fine) close(fd);
        fds[i] = fine ? fd : -1;
    }
}
