// A disk that fails or hangs below any program: LD_PRELOAD this.
//
// BADREADS_UNDER: files below this directory are meant. BADREADS_MODE: a file; while it says "eio", opening them for
// reading and reading them fails with EIO; while it says "slow", each read takes three seconds longer.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define SLOW_SECONDS 3

static int (*real_open)(const char *, int, ...);
static int (*real_openat)(int, const char *, int, ...);
static ssize_t (*real_read)(int, void *, size_t);

static void setup(void) {
    if (real_read) return;
    real_open = dlsym(RTLD_NEXT, "open64");
    real_openat = dlsym(RTLD_NEXT, "openat64");
    real_read = dlsym(RTLD_NEXT, "read");
}

// 0: all is well, 1: EIO, 2: slow
static int mode(void) {
    const char *path = getenv("BADREADS_MODE");
    char text[8] = "";
    setup();
    int fd = path ? real_open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    ssize_t got = real_read(fd, text, sizeof text - 1);
    close(fd);
    return got < 3 ? 0 : text[0] == 'e' ? 1 : 2;
}

static int below(const char *path) {
    const char *under = getenv("BADREADS_UNDER");
    return under && !strncmp(path, under, strlen(under)) && !strstr(path, "/index/");
}

static int bad(int fd) {
    char link[64], path[4096];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (n <= 0) return 0;
    path[n] = 0;
    if (!below(path)) return 0;
    switch (mode()) {
    case 1: errno = EIO; return 1;
    case 2: sleep(SLOW_SECONDS);
    }
    return 0;
}

#define WRAP(name, params, args, fd)                                                                                   \
    ssize_t name params {                                                                                              \
        static ssize_t(*real) params;                                                                                  \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                                                     \
        return bad(fd) ? -1 : real args;                                                                               \
    }

WRAP(read, (int fd, void *to, size_t n), (fd, to, n), fd)
WRAP(pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at), fd)
WRAP(pread64, (int fd, void *to, size_t n, off_t at), (fd, to, n, at), fd)
WRAP(readv, (int fd, const struct iovec *v, int n), (fd, v, n), fd)
WRAP(preadv, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at), fd)
WRAP(preadv64, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at), fd)
WRAP(preadv2, (int fd, const struct iovec *v, int n, off_t at, int f), (fd, v, n, at, f), fd)
WRAP(preadv64v2, (int fd, const struct iovec *v, int n, off_t at, int f), (fd, v, n, at, f), fd)

static int refused(const char *path, int flags) {
    if ((flags & O_ACCMODE) != O_RDONLY || (flags & O_DIRECTORY) || !below(path)) return 0;
    if (mode() != 1) return 0;
    errno = EIO;
    return 1;
}

#define OPEN(name, params, call, path)                                                                           \
    int name params {                                                                                                  \
        int permissions = 0;                                                                                           \
        setup();                                                                                                       \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                                           \
            va_list list;                                                                                              \
            va_start(list, flags);                                                                                     \
            permissions = va_arg(list, int);                                                                           \
            va_end(list);                                                                                              \
        }                                                                                                              \
        return refused(path, flags) ? -1 : call;                                                                       \
    }

OPEN(open, (const char *path, int flags, ...), real_open(path, flags, permissions), path)
OPEN(open64, (const char *path, int flags, ...), real_open(path, flags, permissions), path)
OPEN(openat, (int at, const char *path, int flags, ...), real_openat(at, path, flags, permissions), path)
OPEN(openat64, (int at, const char *path, int flags, ...), real_openat(at, path, flags, permissions), path)
