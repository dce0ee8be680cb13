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

#ifndef SYS_openat2
#define SYS_openat2 437
#endif

/* Bytes read of what the page cache has; or -1 and errno. */
static inline long pread_now(int fd, uint8_t *to, uint64_t nbytes, uint64_t offset) {
#ifdef KVFS_MAY_WAIT /* for tests under an emulator that lacks preadv2 */
    return pread(fd, to, nbytes, (off_t)offset);
#else
    enum { NOWAIT = 8 }; /* RWF_NOWAIT */
    struct iovec one = {to, nbytes};
    return syscall(SYS_preadv2, fd, &one, 1ul, (unsigned long)offset, 0ul, NOWAIT);
#endif
}

/* What errno means for pread_now and openat2: this system, or this file system, cannot. */
static inline int cannot(int code) {
    return code == EOPNOTSUPP || code == EINVAL || code == ENOSYS || code == EPERM;
}

/* stat of what the kernel's cache of names has: 0, -ESTALE (no such name), -EAGAIN (a disk would be asked), -ENOTSUP. */
static inline int64_t stat_now(int folder, const char *name, struct stat *st) {
#ifdef KVFS_MAY_WAIT
    return fstatat(folder, name, st, AT_SYMLINK_NOFOLLOW) ? -ESTALE : 0;
#else
    enum { CACHED = 0x20 }; /* RESOLVE_CACHED */
    struct { uint64_t flags, mode, resolve; } how = {O_PATH | O_NOFOLLOW | O_CLOEXEC, 0, CACHED};
    long fd = syscall(SYS_openat2, folder, name, &how, sizeof how);
    if (fd < 0) return cannot(errno) ? -ENOTSUP : errno == ENOENT ? -ESTALE : -EAGAIN;
    int failed = fstat((int)fd, st);
    close((int)fd);
    return failed ? -EAGAIN : 0;
#endif
}

#endif
