/* System calls that do not wait. Raw ones, since older C libraries lack them. */
#ifndef KVFS_NOW_H
#define KVFS_NOW_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

/* What errno means for preadv2 and cachestat: this system, or this file system, cannot. */
static inline int cannot(int code) {
    return code == EOPNOTSUPP || code == EINVAL || code == ENOSYS || code == EPERM;
}

#ifdef KVFS_READ_HOOK /* for tests: what another process may do before a read; or the read. 1: go on and read */
int64_t kvfs_read_hook(uint8_t *to, uint64_t nbytes, uint64_t offset);
#endif

/* Reads nbytes that are in memory: 0; -EAGAIN: they are not, or the file ends before; -ENOTSUP: this file system does not
 * say; -EIO. *plain (0 at first): set where RWF_NOWAIT does not exist (tmpfs), so that cachestat is asked instead. */
static inline int64_t read_now(int fd, uint8_t *to, uint64_t nbytes, uint64_t offset, uint32_t *plain) {
    long got = -1;
#ifdef KVFS_READ_HOOK
    int64_t done = kvfs_read_hook(to, nbytes, offset);
    if (done <= 0) return done;
#endif
#ifdef KVFS_MAY_WAIT /* for tests under an emulator that has neither call */
    (void)plain;
    got = pread(fd, to, nbytes, (off_t)offset);
#else
    enum { NOWAIT = 8 }; /* RWF_NOWAIT */
    if (!__atomic_load_n(plain, __ATOMIC_RELAXED)) {
        struct iovec one = {to, nbytes};
        got = syscall(SYS_preadv2, fd, &one, 1ul, (unsigned long)offset, 0ul, NOWAIT);
        if (got < 0 && errno == EOPNOTSUPP) __atomic_store_n(plain, 1, __ATOMIC_RELAXED);
    }
    if (__atomic_load_n(plain, __ATOMIC_RELAXED)) {
        struct { uint64_t offset, nbytes; } range = {offset, nbytes};
        struct { uint64_t cached, dirty, writeback, evicted, recent; } found;
        uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
        if (syscall(SYS_cachestat, fd, &range, &found, 0u)) return cannot(errno) ? -ENOTSUP : -EIO;
        if (found.cached < (offset + nbytes - 1) / page - offset / page + 1) return -EAGAIN;
        got = pread(fd, to, nbytes, (off_t)offset);
    }
#endif
    if (got == (long)nbytes) return 0;
    if (got >= 0 || errno == EAGAIN) return -EAGAIN;
    return cannot(errno) ? -ENOTSUP : -EIO;
}

#endif
